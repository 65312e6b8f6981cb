#include "tide.hpp"

#include <algorithm>

#include "tide_paths.hpp"

namespace kvtide {

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
#if defined(KVTIDE_AMX)
  static const std::array paths = {tide_amx, tide_avx512, tide_avx2, tide_portable};
#elif defined(__x86_64__)
  static const std::array paths = {tide_avx512, tide_avx2, tide_portable};
#else
  static const std::array paths = {tide_portable};
#endif
  return paths;
}

}  // namespace kvtide
