// Python's side of quantise.hpp: every size is checked against every other before the core is called.
#include <nanobind/nanobind.h>

#include "binding.hpp"
#include "quantise.hpp"

namespace kvtide {
namespace {

using Steps = Array<std::int16_t, 2>;
using ConstSteps = Array<const std::int16_t, 2>;
using Scales = Array<std::uint16_t, 1>;
using ConstScales = Array<const std::uint16_t, 1>;

constexpr float step_min = 1e-30f;

template <class Values>
void want_values(const Values& values, std::size_t tokens, std::size_t channels, ElementType type) {
  want(values.size() == tokens * channels * element_bytes(type), "values do not have tokens x channels elements");
}

template <class Anchors, class AnchorScales, class Deltas>
Grouping grouping_of(const Anchors& anchors, const AnchorScales& scales, const Deltas& deltas, std::size_t group, int half) {
  want(half >= 1 && half <= 32767, "half the bins must be from 1 to 32767");
  want(group >= 1, "a group has at least one token");
  const Grouping grouping{anchors.shape(1) + deltas.shape(1), anchors.shape(0), group};
  want(deltas.shape(0) == grouping.channels, "anchors and deltas must have the same channels");
  want(grouping.groups() == anchors.shape(1) && scales.size() == anchors.shape(1), "anchors and scales do not fit the groups");
  return grouping;
}

double py_delta_energy(const ConstBytes& values, int type_code, std::size_t tokens, std::size_t channels, std::size_t group) {
  const ElementType type = element_type(type_code);
  want(group >= 1, "a group has at least one token");
  want_values(values, tokens, channels, type);
  return unlocked([&] { return delta_energy(span_of(values), type, Grouping{tokens, channels, group}); });
}

bool py_quantise(const ConstBytes& values, int type_code, std::size_t group, int half, float step, const Steps& anchors,
                 const Scales& scales, const Steps& deltas) {
  const ElementType type = element_type(type_code);
  const Grouping grouping = grouping_of(anchors, scales, deltas, group, half);
  want(step >= step_min, "the step must be at least 1e-30, so that its inverse is finite");
  want_values(values, grouping.tokens, grouping.channels, type);
  return unlocked([&] {
    return quantise(span_of(values), type, grouping, half, step, flat(anchors), span_of(scales), flat(deltas));
  });
}

void py_restore(const ConstSteps& anchors, const ConstScales& scales, const ConstSteps& deltas, std::size_t group, int half,
                float step, int type_code, const Bytes& values) {
  const ElementType type = element_type(type_code);
  const Grouping grouping = grouping_of(anchors, scales, deltas, group, half);
  want_values(values, grouping.tokens, grouping.channels, type);
  unlocked([&] { restore(flat(anchors), span_of(scales), flat(deltas), grouping, half, step, type, span_of(values)); });
}

}  // namespace

void bind_quantise(nb::module_& module) {
  module.def("delta_energy", &py_delta_energy);
  module.def("quantise_groups", &py_quantise);
  module.def("restore_groups", &py_restore);
}

}  // namespace kvtide
