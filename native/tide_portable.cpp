// The tide kernels that run everywhere.
#include "tide_kernels.hpp"

namespace kvtide {
namespace {

struct Portable : LaneByLane {
  static constexpr std::size_t panels_max = 1;
  static constexpr std::size_t block_tokens = vector_block_tokens;

  static void take_contexts(std::int16_t* values, std::size_t count, ContextLists<const std::int16_t>& lists) {
    kvtide::take_contexts(values, count, lists);
  }

  static void put_contexts(const std::int16_t* values, const std::int16_t* parents, std::size_t count,
                           ContextLists<std::int16_t>& lists) {
    kvtide::put_contexts(values, parents, count, lists);
  }

  static void pull_part(const std::int16_t* from, std::size_t count, const std::int8_t* pulls, std::int16_t* out) {
    kvtide::pull_part(from, count, pulls, out);
  }

  template <std::size_t panels>
  static void multiply(const Tile& tile) {
    static_assert(panels == 1);
    std::uint32_t wrapped[tide_panel_tokens][tide_panel_columns] = {};
    for (const std::size_t pair : tile.pairs) {
      const std::int16_t* from = tile.columns + pair * 2 * tide_panel_columns;
      for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
        const std::int16_t* token = tile.tokens + 2 * (pair * tide_panel_tokens + t);
        const int first = token[0], second = token[1];
#pragma GCC unroll 1
        for (std::size_t c = 0; c < tide_panel_columns; ++c) {
          const auto sum = static_cast<std::uint32_t>(first * from[2 * c]) + static_cast<std::uint32_t>(second * from[2 * c + 1]);
          wrapped[t][c] += sum;
        }
      }
    }
    for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
      std::memcpy(tile.sums + t * tile.sums_stride, wrapped[t], sizeof wrapped[t]);
    }
  }

  static void transpose(const std::int16_t* const* from, std::size_t column, std::int16_t* const* to, std::size_t row) {
    for (std::size_t i = 0; i < tile_rows; ++i) {
      for (std::size_t j = 0; j < tile_rows; ++j) to[i][row + j] = from[j][column + i];
    }
  }
};

}  // namespace

const TidePath tide_portable = tide_path<Portable>("portable", [] { return true; });

}  // namespace kvtide
