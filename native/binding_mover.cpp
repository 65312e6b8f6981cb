// Python's side of mover.hpp. What a job refers to is kept by who starts it, as it says there.
#include <system_error>

#include "binding.hpp"
#include "mover.hpp"

namespace kvtide {
namespace {

using Ended = std::tuple<std::uint64_t, std::size_t, int>;

Ended ended(const Outcome& outcome) { return {outcome.id, outcome.moved, outcome.error}; }

Ended receive(Mover& mover, int socket, const Bytes& memory, std::size_t wake_bytes) {
  want(memory.size() > 0, "a body has at least one byte");
  Job job{.direction = Direction::receive, .socket = socket, .size = memory.size(), .memory = {span_of(memory)}, .wake_bytes = wake_bytes};
  return ended(unlocked([&] { return mover.start(std::move(job)); }));
}

Ended send(Mover& mover, int socket, const std::vector<ConstBytes>& memory, std::size_t slice_bytes) {
  Job job{.direction = Direction::send, .socket = socket, .slice_bytes = slice_bytes};
  for (const ConstBytes& piece : memory) {
    want(piece.size() > 0, "a piece has at least one byte");
    // The kernel takes what it writes to and what it reads in one type; a job that sends never writes.
    job.memory.emplace_back(const_cast<std::uint8_t*>(piece.data()), piece.size());
    job.size += piece.size();
  }
  want(job.size > 0, "a body has at least one byte");
  return ended(unlocked([&] { return mover.start(std::move(job)); }));
}

Ended send_file(Mover& mover, int socket, int file, std::int64_t offset, std::size_t size, std::size_t slice_bytes) {
  want(size > 0 && offset >= 0, "a part of a file has at least one byte and begins in it");
  Job job{.direction = Direction::send_file, .socket = socket, .size = size, .file = file, .offset = offset, .slice_bytes = slice_bytes};
  return ended(unlocked([&] { return mover.start(std::move(job)); }));
}

std::vector<Ended> take(Mover& mover) {
  std::vector<Ended> all;
  for (const Outcome& outcome : mover.take()) all.push_back(ended(outcome));
  return all;
}

std::tuple<std::size_t, double> progress(Mover& mover, std::uint64_t id) {
  const Progress found = unlocked([&] { return mover.progress(id); });
  return {found.moved, static_cast<double>(found.moved_ns) * 1e-9};
}

}  // namespace

void bind_mover(nb::module_& module) {
  module.attr("JOB_ENDED") = job_ended;
  module.attr("JOB_STOPPED") = job_stopped;
  nb::class_<Mover>(module, "Mover")
      .def("__init__",
           [](Mover* mover) {
             try {
               new (mover) Mover();
             } catch (const std::system_error& error) {
               errno = error.code().value();
               PyErr_SetFromErrno(PyExc_OSError);
               throw nb::python_error();
             }
           })
      .def("fileno", &Mover::descriptor)
      .def("receive", &receive)
      .def("send", &send)
      .def("send_file", &send_file)
      .def("take", &take)
      .def("stop", [](Mover& mover, std::uint64_t id) { return ended(unlocked([&] { return mover.stop(id); })); })
      .def("progress", &progress)
      .def("shorten", &Mover::shorten);
}

}  // namespace kvtide
