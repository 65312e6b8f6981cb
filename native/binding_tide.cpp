// Python's side of tide.hpp: every size is checked against every other, and every index, before the core is called.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "binding.hpp"
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

void count(const Values& values, const Which& which, const Tables& tables, int mode, const Array<std::int64_t, 1>& counts) {
  const TideRows rows = rows_of(values, which, tables, mode, counts.size());
  unlocked([&] { tide_count(rows, span_of(counts)); });
}

bool take(const std::string& path_name, const Values& values, const Which& which, const Tables& tables, int mode,
          const Array<const std::int16_t, 1>& items, const Array<std::int64_t, 1>& cursors, const Places& stops) {
  const TidePath& path = path_named(path_name);
  want(cursors.size() == stops.size(), "tide: want a stop for each cursor");
  // Vector code reads up to a row beyond what it takes.
  want(items.size() >= 8, "tide: want room behind the lists");
  const std::span<const std::int16_t> usable = span_of(items).first(items.size() - 8);
  const TideRows rows = rows_of(values, which, tables, mode, cursors.size());
  return unlocked([&] { return path.take(rows, {usable, span_of(cursors), span_of(stops)}); });
}

bool put(const std::string& path_name, const Values& values, const Which& which, const Tables& tables, int mode,
         const Values& parents, const Array<std::int16_t, 1>& items, const Array<std::int64_t, 1>& cursors, const Places& stops) {
  const TidePath& path = path_named(path_name);
  want(cursors.size() == stops.size() && parents.size() == values.size(), "tide: want a stop and a parent for each");
  const TideRows rows = rows_of(values, which, tables, mode, cursors.size());
  return unlocked([&] { return path.put(rows, flat(parents), {span_of(items), span_of(cursors), span_of(stops)}); });
}

void pack(const ConstValues& matrix, const Array<std::int16_t, 1>& panels) {
  const std::size_t rows = matrix.shape(0), columns = matrix.shape(1);
  want(panels.size() == tide_panels(columns) * tide_pairs(rows) * 2 * tide_panel_columns, "tide: want whole panels");
  unlocked([&] { tide_pack(flat(matrix), rows, columns, span_of(panels)); });
}

using Shape = std::tuple<std::size_t, std::size_t>;

// A matrix of `shape`, or none: then `order` names a value for each coefficient.
TideMatrix matrix_of(const Array<const std::int16_t, 1>& panels, Shape shape, std::size_t coefficients, bool to_values,
                     const Array<const std::uint16_t, 1>& order, std::size_t values) {
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

template <class Array3>
TideShape shape_of(const Array3& values, const Floats& mean, const Floats& scale) {
  const TideShape shape{values.shape(0), values.shape(1), values.shape(2)};
  want(mean.size() == shape.values() && scale.size() == shape.values(), "tide: want a mean and a scale for each value");
  return shape;
}

void project(const std::string& path_name, const Array<const float, 3>& values, const Floats& mean, const Floats& scale,
             const Array<const std::int16_t, 1>& panels, Shape shape, const Array<const std::uint16_t, 1>& order,
             const Bytes& apart, const Values& out) {
  const TidePath& path = path_named(path_name);
  const TideShape block = shape_of(values, mean, scale);
  want(apart.size() == block.tokens && out.shape(1) == block.tokens, "tide: want outputs of all tokens");
  const TideMatrix matrix = matrix_of(panels, shape, out.shape(0), false, order, block.values());
  const TideProject job{block, flat(values), span_of(mean), span_of(scale), matrix, span_of(order), span_of(apart), flat(out)};
  unlocked([&] { path.project(job); });
}

void restore(const std::string& path_name, const ConstValues& coefficients, const Tables& classes,
             const Array<const std::int8_t, 2>& pulls, const Array<const std::uint16_t, 1>& places, const Floats& mean,
             const Floats& scale, const Array<const std::int16_t, 1>& panels, Shape shape,
             const Array<const std::uint16_t, 1>& order, const Array<float, 3>& out) {
  const TidePath& path = path_named(path_name);
  const TideShape block = shape_of(out, mean, scale);
  const TideMatrix matrix = matrix_of(panels, shape, coefficients.shape(0), true, order, block.values());
  want(coefficients.shape(1) == block.tokens && places.size() == block.tokens, "tide: want a place for each token");
  want(std::ranges::all_of(span_of(places), [&](std::size_t place) { return place < block.tokens; }), "tide: bad place");
  want(classes.shape(0) == coefficients.shape(0) && classes.shape(1) == tide_parts, "tide: want classes of (rows, 4)");
  want(pulls.shape(1) == 4, "tide: want four pulls for each class");
  want(std::ranges::all_of(flat(classes), [&](std::size_t name) { return name < pulls.shape(0); }), "tide: no such class");
  const TideRestore job{block, flat(coefficients), flat(classes), flat(pulls), span_of(places), span_of(mean), span_of(scale),
                        matrix, span_of(order), flat(out)};
  unlocked([&] { path.restore(job); });
}

}  // namespace

void bind_tide(nb::module_& module) {
  module.def("tide_paths", &supported_paths);
  module.def("tide_count", &count, nb::arg("values").noconvert(), nb::arg("which").noconvert(), nb::arg("tables").noconvert(), nb::arg("mode"),
             nb::arg("counts").noconvert());
  module.def("tide_take", &take, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("which").noconvert(), nb::arg("tables").noconvert(), nb::arg("mode"),
             nb::arg("items").noconvert(), nb::arg("cursors").noconvert(), nb::arg("stops").noconvert());
  module.def("tide_put", &put, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("which").noconvert(),
             nb::arg("tables").noconvert(), nb::arg("mode"), nb::arg("parents").noconvert(), nb::arg("items").noconvert(), nb::arg("cursors").noconvert(),
             nb::arg("stops").noconvert());
  module.def("tide_pack", &pack, nb::arg("matrix").noconvert(), nb::arg("panels").noconvert());
  module.def("tide_project", &project, nb::arg("path"), nb::arg("values").noconvert(), nb::arg("mean").noconvert(),
             nb::arg("scale").noconvert(), nb::arg("panels").noconvert(), nb::arg("shape"), nb::arg("order").noconvert(),
             nb::arg("apart").noconvert(), nb::arg("out").noconvert());
  module.def("tide_restore", &restore, nb::arg("path"), nb::arg("coefficients").noconvert(), nb::arg("classes").noconvert(),
             nb::arg("pulls").noconvert(), nb::arg("places").noconvert(), nb::arg("mean").noconvert(),
             nb::arg("scale").noconvert(), nb::arg("panels").noconvert(), nb::arg("shape"), nb::arg("order").noconvert(),
             nb::arg("out").noconvert());
}

}  // namespace kvtide
