// The native module. Binding files alone know Python: they check arguments, release the GIL and call the core.
#include <string>

#include "binding_streams.hpp"
#include "lossless.hpp"

namespace nb = nanobind;

namespace kvtide {
namespace {

SplitFormat format_named(const std::string& name) {
  if (name == "bfloat16") return SplitFormat::bfloat16;
  if (name == "float16") return SplitFormat::float16;
  if (name == "float32") return SplitFormat::float32;
  throw nb::value_error("planes: want bfloat16, float16 or float32");
}

OwnedBytes encode_layer(const std::string& path_name, const ConstBytes& layer, const std::string& format_name) {
  const RansPath& path = path_named(path_name);
  const SplitFormat format = format_named(format_name);
  auto section = unlocked([&] { return std::make_unique<std::vector<std::uint8_t>>(lossless_encode(path, span_of(layer), format)); });
  want(!section->empty(), "lossless_encode: want keys and as many values");
  return own(std::move(section));
}

std::string decode_layer(const std::string& path_name, const ConstBytes& section, const std::string& format_name, const Bytes& layer) {
  const RansPath& path = path_named(path_name);
  const SplitFormat format = format_named(format_name);
  return unlocked([&] { return lossless_decode(path, span_of(section), format, span_of(layer)); });
}

}  // namespace
}  // namespace kvtide

NB_MODULE(_native, module) {
  module.doc() = "Native kernels of kvtide, without I/O or state, and the thread that moves the server's bodies.";
  // Tables that a module or a cache of the user's holds live until the interpreter ends; that is no leak.
  nb::set_leak_warnings(false);
  kvtide::bind_quantise(module);
  kvtide::bind_rope(module);
  module.def("lossless_encode", &kvtide::encode_layer, nb::arg("path"), nb::arg("layer").noconvert(), nb::arg("dtype"));
  module.def("lossless_decode", &kvtide::decode_layer, nb::arg("path"), nb::arg("section").noconvert(), nb::arg("dtype"),
             nb::arg("layer").noconvert());
  kvtide::bind_rans(module);
  kvtide::bind_prefix(module);
  kvtide::bind_tide(module);
  kvtide::bind_mover(module);
}
