// Python's side of rope.hpp: every size is checked against every other before the core is called.
#include "binding.hpp"
#include "rope.hpp"

namespace kvtide {
namespace {

using Table = Array<const float, 2>;

template <class Keys>
RopeShape shape_of(const Keys& keys, std::size_t dim_start, bool neighbours, const Table& cos, const Table& sin) {
  const RopeShape shape{keys.shape(0), keys.shape(1), keys.shape(2), dim_start, cos.shape(1), neighbours};
  want(cos.shape(0) == shape.tokens && sin.shape(0) == shape.tokens, "tables must have a row for each token");
  want(sin.shape(1) == shape.pairs, "cosines and sines must be of the same pairs");
  want(dim_start <= shape.head_dim && 2 * shape.pairs <= shape.head_dim - dim_start, "the rotated dims must be in the head");
  return shape;
}

void py_rope_load(const ConstBytes& keys, int type_code, std::size_t dim_start, bool neighbours, const Table& cos,
                  const Table& sin, const Array<float, 3>& out) {
  const ElementType type = element_type(type_code);
  const RopeShape shape = shape_of(out, dim_start, neighbours, cos, sin);
  want(keys.size() == out.size() * element_bytes(type), "keys and output must have the same elements");
  unlocked([&] { rope_load(span_of(keys), type, shape, flat(cos), flat(sin), flat(out)); });
}

void py_rope_store(const Array<const float, 3>& keys, std::size_t dim_start, bool neighbours, const Table& cos, const Table& sin,
                   int type_code, const Bytes& out) {
  const ElementType type = element_type(type_code);
  const RopeShape shape = shape_of(keys, dim_start, neighbours, cos, sin);
  want(out.size() == keys.size() * element_bytes(type), "keys and output must have the same elements");
  unlocked([&] { rope_store(flat(keys), shape, flat(cos), flat(sin), type, span_of(out)); });
}

}  // namespace

void bind_rope(nb::module_& module) {
  module.def("rope_load", &py_rope_load);
  module.def("rope_store", &py_rope_store);
}

}  // namespace kvtide
