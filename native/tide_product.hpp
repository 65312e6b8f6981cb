// Products of whole numbers around one kernel, and tiles of a transposition, which every instruction set compiles for itself.
//
// Everything is in an unnamed namespace on purpose, as in rans_driver.hpp: each instruction set compiles its own copy.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "tide_paths.hpp"

namespace kvtide {
namespace {

// Tokens whose sums are kept while the panels of a matrix pass by: a panel then stays in the nearest cache. Other kernels may take
// other numbers, `Isa::block_tokens`.
constexpr std::size_t vector_block_tokens = 64;
// Rows and columns of a tile that is transposed at once.
constexpr std::size_t tile_rows = 8;

inline std::size_t padded(std::size_t count, std::size_t unit) { return (count + unit - 1) / unit * unit; }

// What a kernel multiplies: a panel of tokens, [pairs][4][2], by neighbouring panels of columns, [pairs][16][2] each, by the pairs in
// a list: those that are not zero in all four tokens. Sums of a token stand `sums_stride` behind those of the one before.
struct Tile {
  const std::int16_t* tokens;
  const std::int16_t* columns;
  std::size_t panel_stride;
  std::span<const std::uint32_t> pairs;
  std::int32_t* sums;
  std::size_t sums_stride;
};

// How many of these tokens are multiplied at a time: what buffers must hold.
template <class Isa>
std::size_t tokens_at_once(std::size_t tokens) {
  return std::min(Isa::block_tokens, padded(tokens, tide_panel_tokens));
}

// Columns that a product writes: whole panels of them.
constexpr std::size_t panel_columns(std::size_t columns) { return tide_panels(columns) * tide_panel_columns; }

// Tokens times a matrix. `Isa::multiply<n>` takes a tile of n panels, n to `Isa::panels_max`. AMX specialises all of it.
template <class Isa>
class Product {
 public:
  explicit Product(const TideMatrix& matrix)
      : matrix_(matrix), pairs_(tide_pairs(matrix.used_rows)), listed_(Isa::block_tokens / tide_panel_tokens * pairs_) {}

  std::size_t pairs() const { return pairs_; }

  // tokens: panels of [pairs][4][2], which `run` reads; count is a multiple of 4, up to Isa::block_tokens.
  void put(const std::int16_t* tokens, std::size_t count) {
    tokens_ = tokens;
    count_ = count;
    for (std::size_t i = 0; i < count / tide_panel_tokens; ++i) {
      listed_counts_[i] = list_pairs(tokens + i * tide_panel_tokens * pairs_ * 2, listed_.data() + i * pairs_);
    }
  }

  // Multiplies what was put by the matrix's panels [start, stop). sums: of (count, those panels' columns), a token's `stride` behind those
  // of the one before.
  void run(std::size_t start, std::size_t stop, std::int32_t* sums, std::size_t stride) {
    const std::size_t panel_size = tide_pairs(matrix_.rows) * tide_panel_columns * 2;
    for (std::size_t panel = start; panel < stop;) {
      const std::size_t width = std::min(Isa::panels_max, stop - panel);
      for (std::size_t first = 0; first < count_; first += tide_panel_tokens) {
        const std::size_t i = first / tide_panel_tokens;
        const Tile tile = {tokens_ + first * pairs_ * 2,
                           matrix_.panels.data() + panel * panel_size,
                           panel_size,
                           {listed_.data() + i * pairs_, listed_counts_[i]},
                           sums + first * stride + (panel - start) * tide_panel_columns,
                           stride};
        multiply(tile, width);
      }
      panel += width;
    }
  }

 private:
  static void multiply(const Tile& tile, std::size_t width) {
    if constexpr (Isa::panels_max >= 4) {
      if (width == 4) return Isa::template multiply<4>(tile);
      if (width == 3) return Isa::template multiply<3>(tile);
      if (width == 2) return Isa::template multiply<2>(tile);
    }
    Isa::template multiply<1>(tile);
  }

  // Many are zeros: of four tokens a sixth of the pairs at a fine step, two fifths in a base.
  std::size_t list_pairs(const std::int16_t* panel, std::uint32_t* list) const {
    constexpr std::size_t words = tide_panel_tokens * 2 * sizeof *panel / sizeof(std::uint64_t);
    std::size_t count = 0;
    for (std::size_t pair = 0; pair < pairs_; ++pair) {
      std::array<std::uint64_t, words> all;
      std::memcpy(all.data(), panel + pair * tide_panel_tokens * 2, sizeof all);
      std::uint64_t any = 0;
      for (const std::uint64_t word : all) any |= word;
      list[count] = static_cast<std::uint32_t>(pair);
      count += any != 0;
    }
    return count;
  }

  const TideMatrix& matrix_;
  std::size_t pairs_;
  const std::int16_t* tokens_ = nullptr;
  std::size_t count_ = 0;
  std::vector<std::uint32_t> listed_;  // for each panel of tokens, room for all pairs
  std::array<std::size_t, Isa::block_tokens / tide_panel_tokens> listed_counts_;
};

// Puts up to Isa::block_tokens, of which the last panel's need not be there, and multiplies them by all of the matrix.
template <class Isa>
void multiply_all(Product<Isa>& product, const TideMatrix& matrix, const std::int16_t* tokens, std::size_t count, std::int32_t* sums,
                  std::size_t stride) {
  product.put(tokens, padded(count, tide_panel_tokens));
  product.run(0, tide_panels(matrix.used_columns), sums, stride);
}

// to[column + i][row + j] = from[row + j][column + i] for all rows and columns; `Isa::transpose` does whole tiles of 8 by 8.
template <class Isa>
void transpose(const std::int16_t* const* from, std::size_t rows, std::size_t columns, std::int16_t* const* to) {
  const std::size_t whole_rows = rows / tile_rows * tile_rows, whole_columns = columns / tile_rows * tile_rows;
  for (std::size_t column = 0; column < whole_columns; column += tile_rows) {
    for (std::size_t row = 0; row < whole_rows; row += tile_rows) Isa::transpose(from + row, column, to + column, row);
  }
  for (std::size_t column = 0; column < columns; ++column) {
    for (std::size_t row = column < whole_columns ? whole_rows : 0; row < rows; ++row) to[column][row] = from[row][column];
  }
}

// Row numbers that are all beyond the last share one row, which is thrown away.
template <class Isa>
void arrange_rows(const TideArrange& job) {
  const std::size_t tokens = job.places.size();
  std::vector<std::int16_t> none(tokens);
  std::vector<const std::int16_t*> from(tokens);
  std::vector<std::int16_t*> to(job.columns);
  for (std::size_t t = 0; t < tokens; ++t) from[t] = job.steps.data() + job.places[t] * job.columns;
  for (std::size_t c = 0; c < job.columns; ++c) {
    to[c] = job.rows[c] < job.out_rows ? job.out.data() + job.rows[c] * tokens : none.data();
  }
  transpose<Isa>(from.data(), tokens, job.columns, to.data());
}

}  // namespace
}  // namespace kvtide
