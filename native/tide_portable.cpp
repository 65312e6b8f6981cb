// The tide kernels that run everywhere.
#include <cstring>

#include "tide_lists.hpp"
#include "tide_transform.hpp"

namespace kvtide {
namespace {

bool take(const TideRows& rows, const TideLists<const std::int16_t>& lists) { return take_rows(rows, lists, take_contexts); }

void multiply(const std::int16_t* tokens, const std::int16_t* columns, std::span<const std::uint32_t> pairs, std::int32_t* sums) {
  std::uint32_t wrapped[tide_panel_tokens][tide_panel_columns] = {};
  for (const std::size_t pair : pairs) {
    const std::int16_t* from = columns + pair * 2 * tide_panel_columns;
    for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
      const std::int16_t* token = tokens + 2 * (pair * tide_panel_tokens + t);
      for (std::size_t c = 0; c < tide_panel_columns; ++c) {
        wrapped[t][c] += static_cast<std::uint32_t>(token[0] * from[2 * c]);
        wrapped[t][c] += static_cast<std::uint32_t>(token[1] * from[2 * c + 1]);
      }
    }
  }
  std::memcpy(sums, wrapped, sizeof wrapped);
}

}  // namespace

const TidePath tide_portable = {"portable", [] { return true; }, take, put_rows,
                                project_block<multiply>, restore_block<multiply>};

}  // namespace kvtide
