// Checks that every path relies on, then the path's kernels.
#include "rans.hpp"

#include <algorithm>
#include <cstring>

namespace kvtide {
namespace {

// States below rans_state_min never leave an encoder, and every step keeps a state from there on at or above it.
bool are_states_valid(std::span<const std::uint8_t> stream) {
  for (std::size_t lane = 0; lane < rans_lanes; ++lane) {
    std::uint32_t state;
    std::memcpy(&state, stream.data() + lane * sizeof state, sizeof state);
    if (state < rans_state_min) return false;
  }
  return true;
}

bool is_stream_plausible(const RansDecodeJob& job) {
  const std::size_t size = job.stream.size();
  return size >= rans_states_bytes && size % 2 == 0 && size - rans_states_bytes <= 2 * job.count && are_states_valid(job.stream);
}

}  // namespace

bool rans_decode(const RansPath& path, std::span<const RansDecodeJob> jobs, std::size_t element_bytes) {
  if (jobs.empty()) return true;
  if (jobs[0].count == 0) {
    return std::all_of(jobs.begin(), jobs.end(), [](const RansDecodeJob& job) { return job.stream.empty() &&
        job.escape_count == 0; });
  }
  return std::all_of(jobs.begin(), jobs.end(), is_stream_plausible) && path.decode(jobs, element_bytes);
}

bool rans_encode(const RansPath& path, std::span<RansEncodeJob> jobs) {
  if (jobs.empty() || jobs[0].count != 0) return path.encode(jobs);
  for (RansEncodeJob& job : jobs) job.stream_bytes = 0;
  return true;
}

}  // namespace kvtide
