#include "tide.hpp"

#include <algorithm>

#include "tide_paths.hpp"

namespace kvtide {

void tide_count(const TideRows& rows, std::span<std::int64_t> counts) {
  for (std::size_t row = 0; row < rows.which.size(); ++row) {
    for (std::size_t part = 0; part < tide_parts; ++part) {
      const std::size_t start = tide_part_start(part, rows.tokens), stop = tide_part_start(part + 1, rows.tokens);
      const std::size_t table = rows.tables[row * tide_parts + part];
      if (rows.mode != TideMode::context) {
        counts[table] += static_cast<std::int64_t>(stop - start);
        continue;
      }
      const std::int16_t* values = rows.values.data() + rows.which[row] * rows.tokens;
      std::int64_t zeros = 0, ones = 0;
      for (std::size_t t = start; t < stop; ++t) {
        zeros += values[t] == 0;
        ones += values[t] == 1 || values[t] == -1;
      }
      counts[table] += zeros;
      counts[table + 1] += ones;
      counts[table + 2] += static_cast<std::int64_t>(stop - start) - zeros - ones;
    }
  }
}

void tide_pack(std::span<const std::int16_t> matrix, std::size_t rows, std::size_t columns, std::span<std::int16_t> panels) {
  std::ranges::fill(panels, std::int16_t{0});
  const std::size_t stride = tide_pairs(rows) * tide_panel_columns * 2;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < columns; ++column) {
      const std::size_t place = row / 2 * tide_panel_columns + column % tide_panel_columns;
      panels[column / tide_panel_columns * stride + 2 * place + row % 2] = matrix[row * columns + column];
    }
  }
}

std::span<const TidePath> tide_paths() {
#if defined(__x86_64__)
  static const std::array paths = {tide_avx2, tide_portable};
#else
  static const std::array paths = {tide_portable};
#endif
  return paths;
}

}  // namespace kvtide
