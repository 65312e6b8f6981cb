// What the binding files share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "elements.hpp"

namespace kvtide {

namespace nb = nanobind;

template <class Element, std::size_t dimensions>
using Array = nb::ndarray<Element, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;

using Bytes = Array<std::uint8_t, 1>;
using ConstBytes = Array<const std::uint8_t, 1>;

template <class Element>
std::span<Element> span_of(const Array<Element, 1>& array) {
  return {array.data(), array.size()};
}

// Row `row` of a two-dimensional array.
template <class Element>
std::span<Element> row_of(const Array<Element, 2>& array, std::size_t row) {
  return {array.data() + row * array.shape(1), array.shape(1)};
}

inline void want(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

inline ElementType element_type(int code) {
  want(code >= 1 && code <= 3, "element type must be 1, 2 or 3");
  return static_cast<ElementType>(code);
}

// All elements of an array of any shape.
template <class Table>
auto flat(const Table& table) {
  return std::span{table.data(), table.size()};
}

// Calls `work` without the GIL.
template <class Work>
auto unlocked(Work work) {
  nb::gil_scoped_release release;
  return work();
}

constexpr std::size_t div_ceil(std::size_t dividend, std::size_t divisor) { return (dividend + divisor - 1) / divisor; }

template <class Element>
using Owned = nb::ndarray<nb::numpy, Element, nb::ndim<1>>;
using OwnedBytes = Owned<std::uint8_t>;
// Streams back to back, and the size of each.
using EncodedStreams = std::tuple<OwnedBytes, std::vector<std::size_t>>;

// Hands a buffer over to Python without a copy.
template <class Element>
Owned<Element> own(std::unique_ptr<std::vector<Element>> data) {
  std::vector<Element>* kept = data.release();
  nb::capsule owner(kept, [](void* pointer) noexcept { delete static_cast<std::vector<Element>*>(pointer); });
  return Owned<Element>(kept->data(), {kept->size()}, owner);
}

void bind_quantise(nb::module_& module);
void bind_rope(nb::module_& module);
void bind_rans(nb::module_& module);
void bind_prefix(nb::module_& module);
void bind_tide(nb::module_& module);
void bind_mover(nb::module_& module);

}  // namespace kvtide
