// Checks that the AVX-512 kernels, emulated, give and take the bytes of the portable ones. Usage: rans_identity SEED CASES
#include <cstdio>
#include <cstdlib>

#include "rans_cases.hpp"
#include "rans_paths.hpp"

namespace {

template <class Element>
std::vector<Element> decode(const RansCase& made, const kvtide::RansPath& path, const std::vector<std::uint8_t>& stream,
                            const std::vector<Element>& values, bool& ok) {
  constexpr std::size_t streams = 4;  // one group side by side and one on its own
  const std::size_t count = made.symbols.size();
  std::vector<Element> out(streams * count + 1, 77);
  std::vector<Element> escapes(count, 99);
  std::vector<kvtide::RansDecodeJob> jobs;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
  std::size_t escape_count = 0;
  for (const std::uint8_t symbol : made.symbols) escape_count += symbol == kvtide::rans_escape;
  for (std::size_t s = 0; s < streams; ++s) {
    jobs.push_back({made.tables, made.run_tables, stream, bytes, reinterpret_cast<const std::uint8_t*>(escapes.data()),
                    reinterpret_cast<std::uint8_t*>(out.data() + s * count), count, made.run_symbols, escape_count, true});
  }
  ok = kvtide::rans_decode(path, jobs, sizeof(Element));
  return out;
}

template <class Element>
bool is_same_decoded(std::mt19937_64& rng, const RansCase& made, const kvtide::RansPath& path, std::vector<std::uint8_t> stream) {
  std::vector<Element> values(made.tables.size() * kvtide::rans_symbols);
  for (Element& value : values) value = static_cast<Element>(rng());
  for (const bool is_broken : {false, true}) {
    if (is_broken) stream[rng() % stream.size()] ^= static_cast<std::uint8_t>(1u << rng() % 8);
    bool ok = false, truth_ok = false;
    const auto out = decode(made, path, stream, values, ok);
    const auto truth = decode(made, kvtide::rans_portable, stream, values, truth_ok);
    if (ok != truth_ok || (ok && out != truth) || out.back() != 77 || (!is_broken && !ok)) return false;
  }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  std::mt19937_64 rng(std::strtoull(arguments[1], nullptr, 10));
  const long cases = std::strtol(arguments[2], nullptr, 10);
  for (long i = 0; i < cases; ++i) {
    const std::size_t run_symbols = std::array{1, 26, 32, 64, 100, 256}[rng() % 6];
    const RansCase made = random_case(rng, 1 + rng() % (i % 8 == 0 ? 20000 : 300), run_symbols);
    const auto truth = encode_case(made, kvtide::rans_portable);
    for (const kvtide::RansPath& path : {kvtide::rans_avx512, kvtide::rans_avx512_vbmi2}) {
      const bool is_same = encode_case(made, path) == truth && is_same_decoded<std::uint8_t>(rng, made, path, truth) &&
                           is_same_decoded<std::uint16_t>(rng, made, path, truth) &&
                           is_same_decoded<std::uint32_t>(rng, made, path, truth);
      if (is_same) continue;
      std::printf("case %ld: %s differs from portable\n", i, path.name);
      return 1;
    }
  }
  std::printf("%ld cases\n", cases);
  return 0;
}
