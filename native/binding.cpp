// The native module. Binding files alone know Python: they check arguments, release the GIL and call the core.
#include "binding.hpp"

#include <nanobind/stl/string.h>

#include <string>

#include "split.hpp"

namespace nb = nanobind;

namespace kvtide {
namespace {

SplitFormat format_named(const std::string& name) {
  if (name == "bfloat16") return SplitFormat::bfloat16;
  if (name == "float16") return SplitFormat::float16;
  if (name == "float32") return SplitFormat::float32;
  throw nb::value_error("planes: want bfloat16, float16 or float32");
}

constexpr const char* wrong_sizes = "planes: want whole elements and a byte for each of their planes";

void split(const ConstBytes& elements, const std::string& format_name, const Bytes& planes) {
  const SplitFormat format = format_named(format_name);
  want(unlocked([&] { return split_planes(span_of(elements), format, span_of(planes)); }), wrong_sizes);
}

void join(const ConstBytes& planes, const std::string& format_name, const Bytes& elements) {
  const SplitFormat format = format_named(format_name);
  want(unlocked([&] { return join_planes(span_of(planes), format, span_of(elements)); }), wrong_sizes);
}

}  // namespace
}  // namespace kvtide

NB_MODULE(_native, module) {
  module.doc() = "Native kernels of kvtide, without I/O or state, and the thread that moves the server's bodies.";
  // Tables that a module or a cache of the user's holds live until the interpreter ends; that is no leak.
  nb::set_leak_warnings(false);
  kvtide::bind_quantise(module);
  kvtide::bind_rope(module);
  module.def("split_planes", &kvtide::split, nb::arg("elements").noconvert(), nb::arg("dtype"), nb::arg("planes").noconvert());
  module.def("join_planes", &kvtide::join, nb::arg("planes").noconvert(), nb::arg("dtype"), nb::arg("elements").noconvert());
  kvtide::bind_rans(module);
  kvtide::bind_prefix(module);
  kvtide::bind_tide(module);
  kvtide::bind_mover(module);
}
