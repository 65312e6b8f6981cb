// The only native file that knows Python: checks arguments, releases the GIL, calls the core.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "split.hpp"

namespace nb = nanobind;

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<std::uint8_t> span_of(const Bytes& array) { return {array.data(), array.size()}; }
std::span<const std::uint8_t> span_of(const ConstBytes& array) { return {array.data(), array.size()}; }

void split_planes(const ConstBytes& elements, std::size_t item_bytes, const Bytes& planes) {
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = kvtide::split_planes(span_of(elements), item_bytes, span_of(planes));
  }
  if (!ok) throw nb::value_error("split_planes: want items of 2 or 4 bytes and two buffers of one size");
}

void join_planes(const ConstBytes& planes, std::size_t item_bytes, const Bytes& elements) {
  bool ok;
  {
    nb::gil_scoped_release release;
    ok = kvtide::join_planes(span_of(planes), item_bytes, span_of(elements));
  }
  if (!ok) throw nb::value_error("join_planes: want items of 2 or 4 bytes and two buffers of one size");
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "Native kernels of kvtide: no I/O, no state.";
  module.def("split_planes", &split_planes, nb::arg("elements").noconvert(), nb::arg("item_bytes"), nb::arg("planes").noconvert());
  module.def("join_planes", &join_planes, nb::arg("planes").noconvert(), nb::arg("item_bytes"), nb::arg("elements").noconvert());
}
