// Random blocks and lists through every path of the tide kernels, which must agree to the bit. Lists hold any items, as a
// mutated stream may decode to; sizes and indices are right, since the binding checks these. Every buffer ends where the binding
// says that it may.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <tuple>
#include <vector>

#include "tide.hpp"

namespace fuzz_tide {

using kvtide::TidePath;
using Rng = std::mt19937_64;

template <class Number>
std::vector<Number> random_numbers(Rng& rng, std::size_t count, int low, int high) {
  std::vector<Number> found(count);
  for (auto& each : found) each = static_cast<Number>(low + static_cast<int>(rng() % static_cast<unsigned>(high - low + 1)));
  found.shrink_to_fit();
  return found;
}

template <class Number>
std::vector<Number> shuffled(Rng& rng, std::size_t count) {
  std::vector<Number> found(count);
  for (std::size_t i = 0; i < count; ++i) found[i] = static_cast<Number>(i);
  std::shuffle(found.begin(), found.end(), rng);
  return found;
}

// Runs `work` on every path and compares what it returns.
template <class Work>
void on_all_paths(Work work) {
  const auto expected = work(kvtide::tide_paths().back());
  for (const TidePath& path : kvtide::tide_paths()) {
    if (!path.is_supported() || work(path) == expected) continue;
    std::fprintf(stderr, "%s differs\n", path.name);
    std::abort();
  }
}

inline void lists(Rng& rng) {
  const std::size_t rows = 1 + rng() % 6, tokens = 1 + rng() % 300, tables = 3 + rng() % 9;
  const auto mode = static_cast<kvtide::TideMode>(rng() % 3);
  const auto values = random_numbers<std::int16_t>(rng, rows * tokens, rng() % 2 ? -2 : -32768, rng() % 2 ? 2 : 32767);
  const auto after = random_numbers<std::int16_t>(rng, rows * tokens, -6, 6);
  const auto which = shuffled<std::uint32_t>(rng, rows);
  const auto of_parts = random_numbers<std::uint16_t>(rng, rows * 4, 0, static_cast<int>(tables - 3));
  std::vector<std::int64_t> counts(tables), starts(tables), stops(tables);
  auto counted = values;
  kvtide::tide_paths().back().count({counted, which, of_parts, tokens, mode}, counts);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < tables; ++i) {
    starts[i] = end;
    // Now and then a list is too short, or too long.
    stops[i] = end += rng() % 16 ? counts[i] : counts[i] / 2 + static_cast<std::int64_t>(rng() % 9);
  }
  const auto size = static_cast<std::size_t>(end);
  const auto items = random_numbers<std::int16_t>(rng, size + kvtide::tide_slack, -32768, 32767);
  on_all_paths([&](const TidePath& path) {
    auto taken = values;
    auto cursors = starts;
    const bool fits = path.take({taken, which, of_parts, tokens, mode}, {std::span(items).first(size), cursors, stops});
    auto put = std::vector<std::int16_t>(size);
    auto written = after;
    cursors = starts;
    const bool has_put = path.put({written, which, of_parts, tokens, mode}, values, {put, cursors, stops});
    return std::tuple(fits, fits ? taken : values, has_put, has_put ? put : values);
  });
}

// Rows along a trellis, and the cheapest path of coefficients.
inline void trellis(Rng& rng) {
  const std::size_t rows = 1 + rng() % 40, tokens = 1 + rng() % 300, tops = 4, tables = 2 * tops + 6 * tops;
  const bool is_small = rng() % 2;
  const auto parents = random_numbers<std::int16_t>(rng, rows * tokens, is_small ? -2 : -32768, is_small ? 2 : 32767);
  const auto levels = random_numbers<std::int16_t>(rng, rows * tokens, is_small ? -6 : -32768, is_small ? 6 : 32767);
  std::vector<kvtide::TideMode> modes(rows);
  std::vector<std::uint16_t> of_parts(rows * 4);
  for (std::size_t row = 0; row < rows; ++row) {
    modes[row] = static_cast<kvtide::TideMode>(rng() % 3);
    for (std::size_t part = 0; part < 4; ++part) {
      const std::size_t number = rng() % tops;
      of_parts[4 * row + part] = static_cast<std::uint16_t>(modes[row] == kvtide::TideMode::top ? number : 2 * tops + 3 * number);
    }
  }
  auto given = levels;
  const kvtide::TideStates job = {given, modes, of_parts, tokens, {tops, 3 * tops}};
  std::vector<std::int64_t> counts(tables), starts(tables), stops(tables);
  kvtide::tide_paths().back().count_states(job, parents, counts);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < tables; ++i) {
    starts[i] = end;
    stops[i] = end += rng() % 16 ? counts[i] : counts[i] / 2 + static_cast<std::int64_t>(rng() % 9);
  }
  const auto size = static_cast<std::size_t>(end);
  const auto items = random_numbers<std::int16_t>(rng, size + kvtide::tide_slack, is_small ? -1 : -32768, is_small ? 1 : 32767);
  on_all_paths([&](const TidePath& path) {
    std::vector<std::int64_t> counted(tables), cursors = starts;
    path.count_states(job, parents, counted);
    auto put = std::vector<std::int16_t>(size);
    const bool has_put = path.put_states(job, parents, {put, cursors, stops});
    // What was put is taken as it was; any items are taken alike.
    auto taken = parents, back = parents;
    for (std::size_t i = 0; i < back.size(); ++i) {
      if (modes[i / tokens] == kvtide::TideMode::digit) back[i] = levels[i];
    }
    cursors = starts;
    const bool fits = path.take_states({taken, modes, of_parts, tokens, job.twins}, {std::span(items).first(size), cursors, stops});
    if (has_put) {
      put.resize(size + kvtide::tide_slack);
      cursors = starts;
      if (!path.take_states({back, modes, of_parts, tokens, job.twins}, {std::span(put).first(size), cursors, stops})) std::abort();
    }
    return std::tuple(counted, has_put, has_put ? put : levels, fits, fits ? taken : parents, back);
  });

  const auto exact = random_numbers<std::int16_t>(rng, rows * tokens, is_small ? -40 : -32600, is_small ? 40 : 32600);
  const auto classes = random_numbers<std::uint16_t>(rng, rows * 4, 0, 2);
  std::vector<kvtide::TidePrices> rates(3);
  for (auto& each : rates) std::ranges::copy(random_numbers<std::int16_t>(rng, 32, 0, kvtide::tide_rate_max), each.begin());
  on_all_paths([&](const TidePath& path) {
    std::vector<std::int16_t> found(exact.size());
    path.find_path({exact, classes, rates, tokens, found});
    return found;
  });
}

inline std::vector<std::int16_t> panels_of(Rng& rng, std::size_t rows, std::size_t columns) {
  // Now and then any numbers: sums wrap.
  const int most = rng() % 4 ? 900 : 32767;
  const auto matrix = random_numbers<std::int16_t>(rng, rows * columns, -most - 1, most);
  std::vector<std::int16_t> panels(kvtide::tide_panels(columns) * kvtide::tide_pairs(rows) * 2 * kvtide::tide_panel_columns);
  kvtide::tide_pack(matrix, rows, columns, panels);
  return panels;
}

inline void blocks(Rng& rng) {
  const auto type = static_cast<kvtide::ElementType>(1 + rng() % 3);
  const kvtide::TideShape shape = {1 + rng() % 2, 1 + rng() % 140, 1 + rng() % 3, 1 + rng() % 40, type};
  const std::size_t values = shape.values(), used = 1 + rng() % values, pairs = rng() % (shape.head_dim / 2 + 1);
  const bool has_matrix = rng() % 2;
  const auto angles = random_numbers<float>(rng, 2 * shape.tokens * pairs, -1, 1);
  const auto kinds = random_numbers<std::uint8_t>(rng, shape.layers, 0, 1);
  const kvtide::TideTurns turns = {angles, angles, kinds, 0, pairs, rng() % 2 == 0};
  const auto mean = random_numbers<float>(rng, values, -3, 3), scale = random_numbers<float>(rng, values, 1, 4000);
  const auto order = shuffled<std::uint16_t>(rng, values), places = shuffled<std::uint16_t>(rng, shape.tokens);
  const std::size_t apart_count = rng() % std::min<std::size_t>(shape.tokens + 1, 4);
  const std::size_t scaled_values = rng() % 2 ? 1 : shape.head_dim;
  const std::size_t scale_count = shape.streams() * apart_count * shape.channels() / scaled_values;
  const auto scales = random_numbers<std::uint16_t>(rng, scale_count, 0, 0x7f7f);
  const auto bytes = random_numbers<std::int8_t>(rng, shape.streams() * apart_count * shape.channels(), -128, 127);
  const auto coefficients = random_numbers<std::int16_t>(rng, used * shape.tokens, rng() % 2 ? -1 : -32768, 40);
  const auto classes = random_numbers<std::uint16_t>(rng, used * 4, 0, 2);
  const auto pulls = random_numbers<std::int8_t>(rng, rng() % 2 ? 12 : 0, -128, 127);
  const auto to_values = has_matrix ? panels_of(rng, used, values) : std::vector<std::int16_t>();
  on_all_paths([&](const TidePath& path) {
    std::vector<std::uint8_t> bits(shape.streams() * shape.tokens * shape.row_bytes());
    const std::span<const std::uint16_t> no_matrix = has_matrix ? std::span<const std::uint16_t>() : std::span(order);
    path.restore({shape, coefficients, classes, pulls, places, mean, scale, {to_values, used, values, used, values}, no_matrix, {},
                  {std::span(places).first(apart_count), scales, bytes, scaled_values}, turns, bits});
    return bits;
  });

  auto bits = random_numbers<std::uint8_t>(rng, shape.streams() * shape.tokens * shape.row_bytes(), 0, 255);
  // Without this most blocks have a value that is not finite, and end there.
  for (std::size_t i = shape.type == kvtide::ElementType::float32 ? 3 : 1; i < bits.size() && rng() % 64; i += shape.row_bytes() / shape.channels()) bits[i] &= 0x43;
  const auto to_columns = has_matrix ? panels_of(rng, values, used) : std::vector<std::int16_t>();
  const auto is_coded = has_matrix ? std::vector<std::uint8_t>() : random_numbers<std::uint8_t>(rng, values, 0, 1);
  const std::size_t columns = has_matrix ? used : values;
  const auto rows = shuffled<std::uint16_t>(rng, columns);
  const auto weights = random_numbers<float>(rng, columns, 0, 3);
  const int fraction_bits = rng() % 2 ? kvtide::tide_step_bits : 0;
  const auto which = shuffled<std::uint32_t>(rng, shape.tokens);
  on_all_paths([&](const TidePath& path) {
    std::vector<std::int16_t> steps(shape.tokens * columns), sorted(used * shape.tokens), thirds(steps.size());
    std::vector<std::uint8_t> apart(shape.tokens), symbols(steps.size());
    std::vector<float> loud(shape.tokens), squares(shape.layers * shape.tokens);
    kvtide::TideSeen seen;
    const bool is_finite =
        path.project({shape, bits, turns, mean, scale, {to_columns, values, used, values, used}, {}, is_coded, apart, steps, seen, fraction_bits});
    if (is_finite) {
      path.arrange({steps, columns, places, rows, sorted, used});
      path.third(steps, which, columns, thirds);
      path.symbols(steps, steps.size() / 2, symbols);
      path.loudness(steps, weights, loud);
      path.squares(shape, bits, squares);
    }
    const std::tuple judged(seen.error, seen.spread, seen.tokens);
    return std::tuple(is_finite, judged, is_finite ? steps : sorted, sorted, thirds, symbols, loud, squares, is_finite ? apart : symbols);
  });
}

inline void stages(Rng& rng) {
  const kvtide::TideShape shape = {1 + rng() % 2, 1 + rng() % 140, 1 + rng() % 3, 2 * (1 + rng() % 20), kvtide::ElementType::float32};
  const std::size_t values = shape.values(), block = shape.head_dim, mixed = rng() % (values + 1), used = 1 + rng() % values;
  const std::vector<std::uint8_t> kinds(shape.layers);
  const kvtide::TideTurns turns = {{}, {}, kinds, 0, 0, false};
  const auto mean = random_numbers<float>(rng, values, -3, 3), scale = random_numbers<float>(rng, values, 1, 4000);
  const auto order = shuffled<std::uint16_t>(rng, shape.tokens), strongest = shuffled<std::uint16_t>(rng, values);
  std::vector<std::uint16_t> places = shuffled<std::uint16_t>(rng, values);
  places.resize(used);
  std::size_t coded = 0;
  for (std::uint16_t& place : places) {
    if (coded < mixed && rng() % 2) place = static_cast<std::uint16_t>(values + coded++);
  }
  std::vector<std::int16_t> panels;
  for (std::size_t b = 0; b < values / block; ++b) std::ranges::copy(panels_of(rng, block, block), std::back_inserter(panels));
  const auto mix = panels_of(rng, mixed, mixed);
  const kvtide::TideStage stage = {panels, block, std::span(strongest).first(mixed), places};
  const auto coefficients = random_numbers<std::int16_t>(rng, used * shape.tokens, rng() % 2 ? -1 : -32768, 40);
  const auto classes = random_numbers<std::uint16_t>(rng, used * 4, 0, 2);
  const auto pulls = random_numbers<std::int8_t>(rng, rng() % 2 ? 12 : 0, -128, 127);
  on_all_paths([&](const TidePath& path) {
    std::vector<std::uint8_t> bits(shape.streams() * shape.tokens * shape.row_bytes());
    path.restore({shape, coefficients, classes, pulls, order, mean, scale, {mix, mixed, mixed, coded, mixed}, {}, stage, {}, turns, bits});
    return bits;
  });
  auto bits = random_numbers<std::uint8_t>(rng, shape.streams() * shape.tokens * shape.row_bytes(), 0, 255);
  for (std::size_t i = 3; i < bits.size(); i += 4) bits[i] &= 0x43;
  on_all_paths([&](const TidePath& path) {
    std::vector<std::int16_t> steps(shape.tokens * used);
    std::vector<std::uint8_t> apart(shape.tokens);
    kvtide::TideSeen seen;
    const bool is_finite = path.project({shape, bits, turns, mean, scale, {mix, mixed, mixed, mixed, coded}, stage, {}, apart, steps, seen});
    return std::tuple(is_finite, seen.error, seen.spread, seen.tokens, steps, apart);
  });
}

inline void run(Rng& rng) {
  lists(rng);
  trellis(rng);
  blocks(rng);
  stages(rng);
}

}  // namespace fuzz_tide
