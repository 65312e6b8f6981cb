// Python's side of rope.hpp: every size is checked against every other before the core is called.
#include "binding.hpp"
#include "rope.hpp"

namespace kvtide {
namespace {

using Table = Array<const float, 2>;

void py_rope_load(const ConstBytes& keys, int type_code, std::size_t dim_start, bool neighbours, const Table& cos,
                  const Table& sin, const Array<float, 3>& out) {
  const ElementType type = element_type(type_code);
  const RopeShape shape{out.shape(0), out.shape(1), out.shape(2), dim_start, cos.shape(1), neighbours};
  want(cos.shape(0) == shape.tokens && sin.shape(0) == shape.tokens, "tables must have a row for each token");
  want(sin.shape(1) == shape.pairs, "cosines and sines must be of the same pairs");
  want(dim_start <= shape.head_dim && 2 * shape.pairs <= shape.head_dim - dim_start, "the rotated dims must be in the head");
  want(keys.size() == out.size() * element_bytes(type), "keys and output must have the same elements");
  unlocked([&] { rope_load(span_of(keys), type, shape, flat(cos), flat(sin), flat(out)); });
}

}  // namespace

void bind_rope(nb::module_& module) {
  module.def("rope_load", &py_rope_load);
}

}  // namespace kvtide
