// Kernels of the tide codec (docs/codec.md, "Codec tide-1"): symbols between lists and rows, and transforms in whole numbers.
//
// Transforms are products of int16 in int32, so every path gives the same bits, whatever the order of summation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "elements.hpp"

namespace kvtide {

// Tokens of a block are sorted by loudness and cut into parts; a row of coefficients has one table for each part.
inline constexpr std::size_t tide_parts = 4;
constexpr std::size_t tide_part_start(std::size_t part, std::size_t tokens) { return part * tokens / tide_parts; }
// Tokens and columns that a kernel takes at a time; panels are padded to them with zeros.
inline constexpr std::size_t tide_panel_tokens = 4;
inline constexpr std::size_t tide_panel_columns = 16;
// Items that vector code may read behind the last one of a list.
inline constexpr std::size_t tide_slack = 32;
// How many lists follow each other for digits: of zeros, of ones, of the rest.
inline constexpr std::size_t tide_contexts = 3;

enum class TideMode : std::uint8_t {
  top,      // a value of its own
  digit,    // -1, 0, 1 after three times the value so far
  context,  // the same, folded so that 1 is away from zero, in the list of the value's magnitude
};

// Some rows of (all, tokens) values, by number, and the table of each one's parts: (rows, tide_parts).
struct TideRows {
  std::span<std::int16_t> values;
  std::span<const std::uint32_t> which;
  std::span<const std::uint16_t> tables;
  std::size_t tokens;
  TideMode mode;
};

// Lists of all tables in one array; a list's next item stands at its table's cursor and may not reach its stop.
template <class Item>
struct TideLists {
  std::span<Item> items;
  std::span<std::int64_t> cursors;
  std::span<const std::int64_t> stops;
};

// Rows whose levels lie on a trellis, each in one mode: top values; digits with a context; or, in mode `digit`, levels that are here
// already. tables: of the list of quantiser 0; that of quantiser 1 is so many tables further: for top values, for digits.
struct TideStates {
  std::span<std::int16_t> values;
  std::span<const TideMode> modes;
  std::span<const std::uint16_t> tables;
  std::size_t tokens;
  std::array<std::size_t, 2> twins;
};

// Exact coefficients (rows, tokens) in 16ths of a step, and what a level costs: for each class the rate of magnitudes 0 to 14, and of
// more, in quantiser 0, then in quantiser 1, in squares of a 16th, of up to tide_rate_max.
inline constexpr int tide_priced_levels = 16;
inline constexpr int tide_rate_max = 1000;
using TidePrices = std::array<std::int16_t, 2 * tide_priced_levels>;
struct TideTrellis {
  std::span<const std::int16_t> exact;
  std::span<const std::uint16_t> classes;
  std::span<const TidePrices> rates;
  std::size_t tokens;
  std::span<std::int16_t> levels;
};

// Matrices in panels: [columns / 16][rows / 2][16][2], each pair of rows side by side, padded with zeros.
constexpr std::size_t tide_pairs(std::size_t rows) { return (rows + 1) / 2; }
constexpr std::size_t tide_panels(std::size_t columns) { return (columns + tide_panel_columns - 1) / tide_panel_columns; }
void tide_pack(std::span<const std::int16_t> matrix, std::size_t rows, std::size_t columns, std::span<std::int16_t> panels);

// A matrix in panels, of which the first `used_rows` and `used_columns` count. Its entries are in units of 1 / tide_one.
struct TideMatrix {
  std::span<const std::int16_t> panels;
  std::size_t rows, columns, used_rows, used_columns;
};

// The other half of a transform in two stages, none with a `block` of 0. Each run of `block` values has a square matrix of its own;
// the strongest of what it gives, by place in `mixed`, meet the TideMatrix, whose rows and columns are these. `places` has for each coded
// coefficient its place among all blocks' coefficients, or their number and more, rising: its row of the TideMatrix.
struct TideStage {
  std::span<const std::int16_t> block_panels;  // one matrix after the other
  std::size_t block = 0;
  std::span<const std::uint16_t> mixed, places;
  std::size_t panel_size() const { return tide_panels(block) * tide_pairs(block) * 2 * tide_panel_columns; }
};
inline constexpr int tide_one_bits = 13;
inline constexpr int tide_step_bits = 4;  // coefficients are in 16ths of a step where they meet the matrix

// Where a group's values lie: (layers, 2, tokens, heads, head_dim), K before V, elements of `type`.
struct TideShape {
  std::size_t layers, tokens, heads, head_dim;
  ElementType type;
  std::size_t streams() const { return 2 * layers; }
  std::size_t channels() const { return heads * head_dim; }
  std::size_t values() const { return streams() * channels(); }
  std::size_t row_bytes() const { return channels() * element_bytes(type); }
};

// How keys turn between what is coded and what is stored: (kinds, tokens, pairs) cosines and sines, and the kind of each layer. No
// pairs: not at all.
struct TideTurns {
  std::span<const float> cos, sin;
  std::span<const std::uint8_t> kinds;
  std::size_t dim_start, pairs;
  bool neighbours;
};

// What a projection says of how well the profile fits, in squares of a step, over all tokens that do not stand apart: what coding
// loses; how far whole coefficients lie from their means; and how many tokens there are.
struct TideSeen {
  double error = 0, spread = 0, tokens = 0;
};

// Stored values to whole coefficients, (tokens, columns): turned, (value - mean) * scale in 16ths of a step, times the matrix,
// rounded to steps. Without panels there is a column for each value, and those with `is_coded` must fit. Tokens in `apart`
// are left out, and those that are too loud for 16 bits are added to it: all their coefficients are 0.
struct TideProject {
  TideShape shape;
  std::span<const std::uint8_t> bits;
  TideTurns turns;
  std::span<const float> mean, scale;  // of each value of a token
  TideMatrix matrix;                   // rows are values, columns coefficients
  TideStage stage;
  std::span<const std::uint8_t> is_coded;
  std::span<std::uint8_t> apart;  // of each token
  std::span<std::int16_t> out;
  TideSeen& seen;
  int fraction_bits = 0;  // of `out`: 0 for steps, 4 for 16ths of a step
};

// Tokens' columns to rows of coded order: out[row][token] = steps[places[token]][column], where `rows` names each column's row.
struct TideArrange {
  std::span<const std::int16_t> steps;  // (tokens, columns)
  std::size_t columns;
  std::span<const std::uint16_t> places, rows;  // a row beyond the last: the column is left out
  std::span<std::int16_t> out;                  // (out_rows, tokens)
  std::size_t out_rows;
};

// Tokens that are kept whole: a bfloat16 scale for each (layer, K or V, token, head), or for each value, and a byte for each value.
struct TideApart {
  std::span<const std::uint16_t> positions, scales;
  std::span<const std::int8_t> values;
  std::size_t scaled_values;  // that share a scale: those of a head, or one
};

// The way back: coefficients in 16ths of a step, each magnitude pulled to the middle of what it stands for, times the
// matrix, times scale, plus mean, turned, stored. Half steps are pulled nowhere.
struct TideRestore {
  TideShape shape;
  std::span<const std::int16_t> coefficients;  // (matrix.used_rows, tokens), tokens in the order of `places`
  std::span<const std::uint16_t> classes;      // (matrix.used_rows, tide_parts): rows of `pulls`
  std::span<const std::int8_t> pulls;          // (classes, 4): how far magnitudes 0, 1, 2 and above are pulled to zero; none for half steps
  std::span<const std::uint16_t> places;       // where each token belongs
  std::span<const float> mean, scale;
  TideMatrix matrix;  // rows are coefficients, columns values
  std::span<const std::uint16_t> order;
  TideStage stage;
  TideApart apart;
  TideTurns turns;
  std::span<std::uint8_t> bits;
};

// One row of the dispatch table. All rows give the same bits.
struct TidePath {
  const char* name;
  bool (*is_supported)();
  // Adds to each table's count what `rows` will take from its lists.
  void (*count)(const TideRows& rows, std::span<std::int64_t> counts);
  // False, with anything in the rows, if a list is too short.
  bool (*take)(const TideRows& rows, const TideLists<const std::int16_t>& lists);
  bool (*put)(const TideRows& rows, std::span<const std::int16_t> parents, const TideLists<std::int16_t>& lists);
  // As `count`, `take` and `put`, along the paths of a trellis; taken values are in half steps. False if a list is too short.
  void (*count_states)(const TideStates& job, std::span<const std::int16_t> parents, std::span<std::int64_t> counts);
  bool (*take_states)(const TideStates& job, const TideLists<const std::int16_t>& lists);
  bool (*put_states)(const TideStates& job, std::span<const std::int16_t> parents, const TideLists<std::int16_t>& lists);
  // The levels of the least squared error and rate together.
  void (*find_path)(const TideTrellis& job);
  // False if a value is not finite.
  bool (*project)(const TideProject& job);
  void (*arrange)(const TideArrange& job);
  void (*restore)(const TideRestore& job);
  // Adds to each token's loudness the sum of its magnitudes, each times its column's weight. steps: (tokens, columns).
  void (*loudness)(std::span<const std::int16_t> steps, std::span<const float> weights, std::span<float> loud);
  // The sum of squares of each layer's V in each token: (layers, tokens), of `bits` of this shape.
  void (*squares)(const TideShape& shape, std::span<const std::uint8_t> bits, std::span<float> out);
  // The whole number nearest to a third of each value, in some rows of so many columns.
  void (*third)(std::span<const std::int16_t> values, std::span<const std::uint32_t> which, std::size_t columns, std::span<std::int16_t> out);
  // Items as symbols: the first `tops` from -15 on, what does not fit as 31; the rest from -1 on.
  void (*symbols)(std::span<const std::int16_t> items, std::size_t tops, std::span<std::uint8_t> out);
};

std::span<const TidePath> tide_paths();

}  // namespace kvtide
