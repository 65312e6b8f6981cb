// The native module. Binding files alone know Python: they check arguments, release the GIL and call the core.
#include "binding.hpp"
#include "split.hpp"

namespace nb = nanobind;

namespace {

using kvtide::Bytes;
using kvtide::ConstBytes;
using kvtide::span_of;

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
  kvtide::bind_rans(module);
  kvtide::bind_prefix(module);
  module.def("split_planes", &split_planes, nb::arg("elements").noconvert(), nb::arg("item_bytes"), nb::arg("planes").noconvert());
  module.def("join_planes", &join_planes, nb::arg("planes").noconvert(), nb::arg("item_bytes"), nb::arg("elements").noconvert());
}
