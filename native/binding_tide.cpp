// Python's side of tide.hpp: every size is checked against every other, and every index, before the core is called.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "binding.hpp"
#include "streams.hpp"
#include "tide.hpp"

namespace kvtide {
namespace {

using Values = Array<std::int16_t, 2>;
using ConstValues = Array<const std::int16_t, 2>;
using Which = Array<const std::uint32_t, 1>;
using Tables = Array<const std::uint16_t, 2>;
using Places = Array<const std::int64_t, 1>;
using Floats = Array<const float, 1>;

std::vector<std::string> supported_paths() {
  std::vector<std::string> names;
  for (const TidePath& path : tide_paths()) {
    if (path.is_supported()) names.emplace_back(path.name);
  }
  return names;
}

const TidePath& path_named(const std::string& name) {
  for (const TidePath& path : tide_paths()) {
    if (name == path.name && path.is_supported()) return path;
  }
  throw nb::value_error("tide: this CPU has no such path");
}

TideRows rows_of(const Values& values, const Which& which, const Tables& tables, int mode, std::size_t lists) {
  want(mode >= 0 && mode <= 2, "tide: mode must be 0, 1 or 2");
  want(tables.shape(0) == which.size() && tables.shape(1) == tide_parts, "tide: want tables of (rows, 4)");
  want(std::ranges::all_of(span_of(which), [&](std::size_t row) { return row < values.shape(0); }), "tide: no such row");
  const TideRows rows{flat(values), span_of(which), flat(tables), values.shape(1), static_cast<TideMode>(mode)};
  const std::size_t taken = rows.mode == TideMode::context ? tide_contexts : 1;
  want(std::ranges::all_of(rows.tables, [&](std::size_t table) { return table + taken <= lists; }), "tide: no such table");
  return rows;
}

void count(const std::string& path_name, const Values& values, const Which& which, const Tables& tables, int mode,
           const Array<std::int64_t, 1>& counts) {
  const TidePath& path = path_named(path_name);
  const TideRows rows = rows_of(values, which, tables, mode, counts.size());
  unlocked([&] { path.count(rows, span_of(counts)); });
}

// Lists to take from.
TideLists<const std::int16_t> taken_lists(const Array<const std::int16_t, 1>& items, const Array<std::int64_t, 1>& cursors, const Places& stops) {
  want(cursors.size() == stops.size(), "tide: want a stop for each cursor");
  // Vector code reads up to a row beyond what it takes.
  want(items.size() >= tide_slack, "tide: want room behind the lists");
  return {span_of(items).first(items.size() - tide_slack), span_of(cursors), span_of(stops)};
}

bool take(const std::string& path_name, const Values& values, const Which& which, const Tables& tables, int mode,
          const Array<const std::int16_t, 1>& items, const Array<std::int64_t, 1>& cursors, const Places& stops) {
  const TidePath& path = path_named(path_name);
  const auto lists = taken_lists(items, cursors, stops);
  const TideRows rows = rows_of(values, which, tables, mode, cursors.size());
  return unlocked([&] { return path.take(rows, lists); });
}

bool put(const std::string& path_name, const Values& values, const Which& which, const Tables& tables, int mode,
         const Values& parents, const Array<std::int16_t, 1>& items, const Array<std::int64_t, 1>& cursors, const Places& stops) {
  const TidePath& path = path_named(path_name);
  want(cursors.size() == stops.size() && parents.size() == values.size(), "tide: want a stop and a parent for each");
  const TideRows rows = rows_of(values, which, tables, mode, cursors.size());
  return unlocked([&] { return path.put(rows, flat(parents), {span_of(items), span_of(cursors), span_of(stops)}); });
}

using Modes = Array<const std::uint8_t, 1>;
using Twins = std::tuple<std::size_t, std::size_t>;

// The modes of rows as the core has them; any other number is refused.
std::vector<TideMode> modes_of(const Modes& modes) {
  std::vector<TideMode> found;
  for (const std::uint8_t mode : span_of(modes)) {
    want(mode <= 2, "tide: mode must be 0, 1 or 2");
    found.push_back(static_cast<TideMode>(mode));
  }
  return found;
}

TideStates states_of(const Values& values, std::span<const TideMode> modes, const Tables& tables, Twins twins, std::size_t lists) {
  const auto [tops, digits] = twins;
  want(modes.size() == values.shape(0) && tables.shape(0) == modes.size() && tables.shape(1) == tide_parts,
       "tide: want a mode and tables of 4 parts for each row");
  want(tops < lists && digits < lists, "tide: no such twin");
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const TideMode mode = modes[i / tide_parts];
    const std::size_t last = mode == TideMode::top ? tops : mode == TideMode::context ? digits + tide_contexts - 1 : 0;
    want(flat(tables)[i] + last < lists, "tide: no such table");
  }
  return {flat(values), modes, flat(tables), values.shape(1), {tops, digits}};
}

void count_states(const std::string& path_name, const Values& values, const Values& parents, const Modes& modes, const Tables& tables,
                  Twins twins, const Array<std::int64_t, 1>& counts) {
  const TidePath& path = path_named(path_name);
  const std::vector<TideMode> by_row = modes_of(modes);
  want(parents.size() == values.size(), "tide: want a parent for each value");
  const TideStates job = states_of(values, by_row, tables, twins, counts.size());
  unlocked([&] { path.count_states(job, flat(parents), span_of(counts)); });
}

bool take_states(const std::string& path_name, const Values& values, const Modes& modes, const Tables& tables, Twins twins,
                 const Array<const std::int16_t, 1>& items, const Array<std::int64_t, 1>& cursors, const Places& stops) {
  const TidePath& path = path_named(path_name);
  const std::vector<TideMode> by_row = modes_of(modes);
  const auto lists = taken_lists(items, cursors, stops);
  const TideStates job = states_of(values, by_row, tables, twins, cursors.size());
  return unlocked([&] { return path.take_states(job, lists); });
}

bool put_states(const std::string& path_name, const Values& values, const Values& parents, const Modes& modes, const Tables& tables,
                Twins twins, const Array<std::int16_t, 1>& items, const Array<std::int64_t, 1>& cursors, const Places& stops) {
  const TidePath& path = path_named(path_name);
  const std::vector<TideMode> by_row = modes_of(modes);
  want(cursors.size() == stops.size() && parents.size() == values.size(), "tide: want a stop and a parent for each");
  const TideStates job = states_of(values, by_row, tables, twins, cursors.size());
  return unlocked([&] { return path.put_states(job, flat(parents), {span_of(items), span_of(cursors), span_of(stops)}); });
}

void find_path(const std::string& path_name, const ConstValues& exact, const Tables& classes, const ConstValues& rates,
               const Values& levels) {
  const TidePath& path = path_named(path_name);
  const std::size_t rows = exact.shape(0), tokens = exact.shape(1);
  want(levels.size() == exact.size() && tokens > 0, "tide: want a level for each coefficient");
  want(classes.shape(0) == rows && classes.shape(1) == tide_parts, "tide: want classes of (rows, 4)");
  want(rates.shape(1) == 2 * tide_priced_levels, "tide: want 32 rates for each class");
  want(std::ranges::all_of(flat(classes), [&](std::size_t name) { return name < rates.shape(0); }), "tide: no such class");
  want(std::ranges::all_of(flat(rates), [](int rate) { return rate >= 0 && rate <= tide_rate_max; }), "tide: a rate is too large");
  const std::span prices(reinterpret_cast<const TidePrices*>(rates.data()), rates.shape(0));
  const TideTrellis job{flat(exact), flat(classes), prices, tokens, flat(levels)};
  want(std::ranges::all_of(job.exact, [](int value) { return value >= -32600 && value <= 32600; }), "tide: a coefficient is too large");
  unlocked([&] { path.find_path(job); });
}

void pack(const ConstValues& matrix, const Array<std::int16_t, 1>& panels) {
  const std::size_t rows = matrix.shape(0), columns = matrix.shape(1);
  want(panels.size() == tide_panels(columns) * tide_pairs(rows) * 2 * tide_panel_columns, "tide: want whole panels");
  unlocked([&] { tide_pack(flat(matrix), rows, columns, span_of(panels)); });
}

using Shape = std::tuple<std::size_t, std::size_t>;
using Order = Array<const std::uint16_t, 1>;

// A matrix of `shape`, or none: then `order` names a value for each coefficient.
TideMatrix matrix_of(const Array<const std::int16_t, 1>& panels, Shape shape, std::size_t coefficients, bool to_values,
                     const Order& order, std::size_t values) {
  const auto [rows, columns] = shape;
  const TideMatrix matrix{span_of(panels), rows, columns, to_values ? coefficients : rows, to_values ? columns : coefficients};
  want(matrix.used_rows <= rows && matrix.used_columns <= columns, "tide: more coefficients than the matrix has");
  want((to_values ? columns : rows) == values, "tide: the matrix is not of these values");
  if (order.size() == 0) {
    want(panels.size() == tide_panels(columns) * tide_pairs(rows) * 2 * tide_panel_columns, "tide: want whole panels");
    return matrix;
  }
  want(panels.size() == 0 && order.size() >= coefficients, "tide: want a matrix or an order");
  want(std::ranges::all_of(span_of(order), [&](std::size_t value) { return value < values; }), "tide: order beyond the values");
  return matrix;
}

// (layers, 2, tokens, heads, head_dim) and the element type's code.
using BlockShape = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t>;

template <class Data>
TideShape shape_of(const Data& bits, BlockShape shape, int type) {
  const auto [layers, two, tokens, heads, head_dim] = shape;
  const TideShape found{layers, tokens, heads, head_dim, element_type(type)};
  want(two == 2 && layers > 0 && tokens > 0 && heads > 0 && head_dim > 0, "tide: want a shape of (layers, 2, …)");
  want(tokens <= 65536 && std::max({layers, heads, head_dim}) <= 65536, "tide: the shape is too large");
  want(bits.size() == found.streams() * tokens * found.row_bytes(), "tide: bits are not of the shape");
  return found;
}

template <class Data>
TideShape shape_of(const Data& bits, BlockShape shape, int type, const Floats& mean, const Floats& scale) {
  const TideShape found = shape_of(bits, shape, type);
  want(mean.size() == found.values() && scale.size() == found.values(), "tide: want a mean and a scale for each value");
  return found;
}

// Panels of all blocks, the values of a block, places that are mixed, and the place of each coded coefficient. A block of 0: one stage.
using Stage = std::tuple<Array<const std::int16_t, 1>, std::size_t, Order, Order>;

TideStage stage_of(const Stage& stage, const TideShape& shape, std::size_t coefficients) {
  const auto& [panels, block, mixed, places] = stage;
  const TideStage found{span_of(panels), block, span_of(mixed), span_of(places)};
  if (block == 0) return {};
  const std::size_t values = shape.values();
  want(block % 2 == 0 && shape.head_dim % block == 0, "tide: want blocks that are even parts of a head");
  want(panels.size() == values / block * found.panel_size(), "tide: want whole panels of all blocks");
  want(std::ranges::all_of(found.mixed, [&](std::size_t place) { return place < values; }), "tide: bad place");
  want(places.size() == coefficients, "tide: want a place for each coefficient");
  // What is mixed is coded in the order of the matrix's rows.
  std::size_t next = values;
  want(std::ranges::all_of(found.places, [&](std::size_t place) { return place < values || place == next++; }), "tide: bad place");
  return found;
}

// How many coefficients meet the matrix, and the values on its other side.
std::size_t matrix_coefficients(const TideStage& stage, std::size_t coefficients, const TideShape& shape) {
  if (stage.block == 0) return coefficients;
  return static_cast<std::size_t>(std::ranges::count_if(stage.places, [&](std::size_t place) { return place >= shape.values(); }));
}
std::size_t matrix_values(const TideStage& stage, const TideShape& shape) {
  return stage.block == 0 ? shape.values() : stage.mixed.size();
}

// Cosines and sines of (kinds, tokens, pairs), the kind of each layer, the first dim, and whether pairs are neighbours.
using TurnTable = Array<const float, 3>;
using Turns = std::tuple<TurnTable, TurnTable, ConstBytes, std::size_t, bool>;

TideTurns turns_of(const Turns& turns, const TideShape& shape) {
  const auto& [cos, sin, kinds, dim_start, neighbours] = turns;
  const std::size_t pairs = cos.shape(2);
  want(cos.size() == sin.size() && sin.shape(2) == pairs && cos.shape(1) == shape.tokens && kinds.size() == shape.layers,
       "tide: want cosines and sines of all tokens, and a kind for each layer");
  want(dim_start <= shape.head_dim && 2 * pairs <= shape.head_dim - dim_start, "tide: more pairs than a head has");
  want(std::ranges::all_of(span_of(kinds), [&](std::size_t kind) { return pairs == 0 || kind < cos.shape(0); }), "tide: no such kind");
  return {flat(cos), flat(sin), span_of(kinds), dim_start, pairs, neighbours};
}

// None if a value is not finite; else what TideSeen has.
std::optional<std::tuple<double, double, double>> project(const std::string& path_name, const ConstBytes& bits, BlockShape block, int type, const Turns& turns,
             const Floats& mean, const Floats& scale, const Array<const std::int16_t, 1>& panels, Shape shape, const Stage& stage,
             const ConstBytes& is_coded, const Bytes& apart, const Values& out, int fraction_bits) {
  const TidePath& path = path_named(path_name);
  const TideShape found = shape_of(bits, block, type, mean, scale);
  want(apart.size() == found.tokens && out.shape(0) == found.tokens, "tide: want outputs of all tokens");
  const TideStage blocks = stage_of(stage, found, out.shape(1));
  const bool is_whole = is_coded.size() == found.values() && out.shape(1) == found.values();
  want(is_coded.size() == 0 || (is_whole && panels.size() == 0 && blocks.block == 0),
       "tide: want a matrix, or to know of each value whether it is coded");
  const TideMatrix matrix = is_coded.size() == 0 ? matrix_of(panels, shape, matrix_coefficients(blocks, out.shape(1), found), false, Order(), matrix_values(blocks, found))
                                                 : TideMatrix{{}, 0, 0, 0, 0};
  want(fraction_bits == 0 || fraction_bits == tide_step_bits, "tide: steps or 16ths of them");
  TideSeen seen;
  const TideProject job{found, span_of(bits), turns_of(turns, found), span_of(mean), span_of(scale), matrix, blocks, span_of(is_coded),
                        span_of(apart), flat(out), seen, fraction_bits};
  if (!unlocked([&] { return path.project(job); })) return std::nullopt;
  return std::tuple{seen.error, seen.spread, seen.tokens};
}

void arrange(const std::string& path_name, const ConstValues& steps, const Order& places, const Order& rows, const Values& out) {
  const TidePath& path = path_named(path_name);
  const std::size_t tokens = steps.shape(0);
  want(places.size() == tokens && out.shape(1) == tokens && rows.size() == steps.shape(1), "tide: want a place and a row for each");
  want(std::ranges::all_of(span_of(places), [&](std::size_t place) { return place < tokens; }), "tide: bad place");
  unlocked([&] {
    path.arrange({flat(steps), steps.shape(1), span_of(places), span_of(rows), flat(out), out.shape(0)});
  });
}

// Positions, scales of (layers, 2, positions, heads) or of values, values of (layers, 2, positions, heads, head_dim).
using Apart = std::tuple<Order, Array<const std::uint16_t, 4>, Array<const std::int8_t, 5>>;

TideApart apart_of(const Apart& apart, const TideShape& shape) {
  const auto& [positions, scales, values] = apart;
  const std::size_t heads = shape.streams() * positions.size() * shape.heads;
  want(values.size() == heads * shape.head_dim && (scales.size() == heads || scales.size() == values.size()),
       "tide: want values of all heads of tokens that stand apart, and a scale for each head or value");
  want(std::ranges::all_of(span_of(positions), [&](std::size_t place) { return place < shape.tokens; }), "tide: bad position");
  return {span_of(positions), flat(scales), flat(values), scales.size() == values.size() ? 1 : shape.head_dim};
}

void restore(const std::string& path_name, const ConstValues& coefficients, const Tables& classes,
             const Array<const std::int8_t, 2>& pulls, const Order& places, const Floats& mean, const Floats& scale,
             const Array<const std::int16_t, 1>& panels, Shape shape, const Order& order, const Stage& stage, const Apart& apart,
             const Turns& turns, const Bytes& bits, BlockShape block, int type) {
  const TidePath& path = path_named(path_name);
  const TideShape found = shape_of(bits, block, type, mean, scale);
  const TideStage blocks = stage_of(stage, found, coefficients.shape(0));
  want(blocks.block == 0 || order.size() == 0, "tide: want blocks or an order");
  const TideMatrix matrix = matrix_of(panels, shape, matrix_coefficients(blocks, coefficients.shape(0), found), true, order, matrix_values(blocks, found));
  want(coefficients.shape(1) == found.tokens && places.size() == found.tokens, "tide: want a place for each token");
  want(std::ranges::all_of(span_of(places), [&](std::size_t place) { return place < found.tokens; }), "tide: bad place");
  want(classes.shape(0) == coefficients.shape(0) && classes.shape(1) == tide_parts, "tide: want classes of (rows, 4)");
  want(pulls.shape(1) == 4, "tide: want four pulls for each class");
  want(pulls.size() == 0 || std::ranges::all_of(flat(classes), [&](std::size_t name) { return name < pulls.shape(0); }), "tide: no such class");
  const TideRestore job{found, flat(coefficients), flat(classes), flat(pulls), span_of(places), span_of(mean), span_of(scale),
                        matrix, span_of(order), blocks, apart_of(apart, found), turns_of(turns, found), span_of(bits)};
  unlocked([&] { path.restore(job); });
}

void loudness(const std::string& path_name, const ConstValues& steps, const Floats& weights, const Array<float, 1>& loud) {
  const TidePath& path = path_named(path_name);
  want(steps.shape(0) == loud.size() && steps.shape(1) == weights.size(), "tide: want a weight for each column");
  unlocked([&] { path.loudness(flat(steps), span_of(weights), span_of(loud)); });
}

void squares(const std::string& path_name, const ConstBytes& bits, BlockShape block, int type, const Array<float, 2>& out) {
  const TidePath& path = path_named(path_name);
  const TideShape shape = shape_of(bits, block, type);
  want(out.shape(0) == shape.layers && out.shape(1) == shape.tokens, "tide: want a sum for each layer and token");
  unlocked([&] { path.squares(shape, span_of(bits), flat(out)); });
}

void third(const std::string& path_name, const ConstValues& values, const Which& which, const Values& out) {
  const TidePath& path = path_named(path_name);
  want(values.shape(0) == out.shape(0) && values.shape(1) == out.shape(1), "tide: want as many thirds as values");
  want(std::ranges::all_of(span_of(which), [&](std::size_t row) { return row < values.shape(0); }), "tide: no such row");
  unlocked([&] { path.third(flat(values), span_of(which), values.shape(1), flat(out)); });
}

// Where symbols are that stand for no item.
Owned<std::int64_t> symbols(const std::string& path_name, const Array<const std::int16_t, 1>& items, std::size_t tops, const Bytes& out) {
  const TidePath& path = path_named(path_name);
  want(tops <= items.size() && items.size() == out.size(), "tide: want a symbol for each item");
  auto escapes = std::make_unique<std::vector<std::int64_t>>();
  unlocked([&] {
    path.symbols(span_of(items), tops, span_of(out));
    const std::uint8_t* const stop = out.data() + tops;
    for (const void* at = out.data(); (at = std::memchr(at, escape_symbol, static_cast<std::size_t>(stop - static_cast<const std::uint8_t*>(at))));) {
      escapes->push_back(static_cast<const std::uint8_t*>(at) - out.data());
      at = static_cast<const std::uint8_t*>(at) + 1;
    }
  });
  return own(std::move(escapes));
}

}  // namespace

void bind_tide(nb::module_& module) {
  module.def("tide_paths", &supported_paths);
  module.attr("TIDE_SLACK") = tide_slack;
  module.def("tide_count", &count, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("which").noconvert(),
             nb::arg("tables").noconvert(), nb::arg("mode"), nb::arg("counts").noconvert());
  module.def("tide_take", &take, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("which").noconvert(), nb::arg("tables").noconvert(), nb::arg("mode"),
             nb::arg("items").noconvert(), nb::arg("cursors").noconvert(), nb::arg("stops").noconvert());
  module.def("tide_put", &put, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("which").noconvert(),
             nb::arg("tables").noconvert(), nb::arg("mode"), nb::arg("parents").noconvert(), nb::arg("items").noconvert(), nb::arg("cursors").noconvert(),
             nb::arg("stops").noconvert());
  module.def("tide_count_states", &count_states, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("parents").noconvert(),
             nb::arg("modes").noconvert(), nb::arg("tables").noconvert(), nb::arg("twins"), nb::arg("counts").noconvert());
  module.def("tide_take_states", &take_states, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("modes").noconvert(),
             nb::arg("tables").noconvert(), nb::arg("twins"), nb::arg("items").noconvert(), nb::arg("cursors").noconvert(), nb::arg("stops").noconvert());
  module.def("tide_put_states", &put_states, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("parents").noconvert(),
             nb::arg("modes").noconvert(), nb::arg("tables").noconvert(), nb::arg("twins"), nb::arg("items").noconvert(),
             nb::arg("cursors").noconvert(), nb::arg("stops").noconvert());
  module.def("tide_find_path", &find_path, nb::arg("path"), nb::arg("exact").noconvert(), nb::arg("classes").noconvert(),
             nb::arg("rates").noconvert(), nb::arg("levels").noconvert());
  module.def("tide_pack", &pack, nb::arg("matrix").noconvert(), nb::arg("panels").noconvert());
  module.def("tide_project", &project, nb::arg("path"), nb::arg("bits").noconvert(), nb::arg("block"), nb::arg("type"),
             nb::arg("turns"), nb::arg("mean").noconvert(), nb::arg("scale").noconvert(), nb::arg("panels").noconvert(),
             nb::arg("shape"), nb::arg("stage"), nb::arg("is_coded").noconvert(), nb::arg("apart").noconvert(), nb::arg("out").noconvert(),
             nb::arg("fraction_bits") = 0);
  module.def("tide_arrange", &arrange, nb::arg("path"), nb::arg("steps").noconvert(), nb::arg("places").noconvert(),
             nb::arg("rows").noconvert(), nb::arg("out").noconvert());
  module.def("tide_restore", &restore, nb::arg("path"), nb::arg("coefficients").noconvert(), nb::arg("classes").noconvert(),
             nb::arg("pulls").noconvert(), nb::arg("places").noconvert(), nb::arg("mean").noconvert(),
             nb::arg("scale").noconvert(), nb::arg("panels").noconvert(), nb::arg("shape"), nb::arg("order").noconvert(),
             nb::arg("stage"), nb::arg("apart"), nb::arg("turns"), nb::arg("bits").noconvert(), nb::arg("block"), nb::arg("type"));
  module.def("tide_loudness", &loudness, nb::arg("path"), nb::arg("steps").noconvert(), nb::arg("weights").noconvert(),
             nb::arg("loud").noconvert());
  module.def("tide_squares", &squares, nb::arg("path"), nb::arg("bits").noconvert(), nb::arg("block"), nb::arg("type"), nb::arg("out").noconvert());
  module.def("tide_third", &third, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("which").noconvert(), nb::arg("out").noconvert());
  module.def("tide_symbols", &symbols, nb::arg("path"), nb::arg("items").noconvert(), nb::arg("tops"), nb::arg("out").noconvert());
}

}  // namespace kvtide
