// Moves bodies between peers that stop, reset, half-close, stall and dribble, by jobs that are stopped and shortened at any
// moment. Memory has its exact size and is freed as soon as a job is over, files shrink while they are sent. Built with
// sanitizers. Usage: mover_stress BATCHES SEED.
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "mover.hpp"

namespace {

using namespace kvtide;
using Rng = std::mt19937_64;
using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t slice_bytes = 64 << 10;
constexpr int jobs_at_once = 6;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

constexpr std::size_t size_max = 4 << 20;

// What every body begins with.
const Bytes content = [] {
  Rng rng(1);
  Bytes bytes(size_max);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(rng());
  return bytes;
}();

enum class Peer { whole, cut, reset, half_closed, stalled, dribbling };
enum class Owner { patient, stopping, shortening };

void pair_of(Rng& rng, int (&ends)[2]) {
  if (rng() % 2) {
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
  } else {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    require(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(listener, 1) == 0, "listen");
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    ends[1] = socket(AF_INET, SOCK_STREAM, 0);
    require(connect(ends[1], reinterpret_cast<sockaddr*>(&address), size) == 0, "connect");
    ends[0] = accept(listener, nullptr, nullptr);
    close(listener);
  }
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
}

struct Case {
  Direction direction{};
  Peer peer{};
  Owner owner{};
  bool shrinks = false;
  std::size_t size = 0, cut = 0;
  int socket = -1, file = -1;
  std::vector<std::unique_ptr<std::uint8_t[]>> pieces;
  std::vector<std::span<std::uint8_t>> memory;
  std::uint64_t id = 0;
  std::size_t shortened = 0;
  // What the peer got, once its thread has ended.
  std::size_t peer_bytes = 0;
  bool is_peer_right = true;
  std::thread thread;

  void play_peer(int end);
  void finish(const Outcome& outcome);
};

void Case::play_peer(int end) {
  const std::size_t stop = peer == Peer::whole || peer == Peer::dribbling || peer == Peer::stalled ? size : cut;
  const std::size_t step = peer == Peer::dribbling ? 1 + size / 50 : 128 << 10;
  Bytes data(step);
  if (peer == Peer::stalled) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  std::size_t at = 0;
  while (direction == Direction::receive ? at < stop : peer == Peer::whole || peer == Peer::stalled || at < stop) {
    ssize_t count = 0;
    if (direction == Direction::receive) {
      count = send(end, content.data() + at, std::min(step, stop - at), MSG_NOSIGNAL);
    } else {
      count = recv(end, data.data(), step, 0);
      is_peer_right &= std::equal(data.begin(), data.begin() + std::max<ssize_t>(count, 0), content.begin() + static_cast<std::ptrdiff_t>(at));
    }
    if (count <= 0) break;
    at += static_cast<std::size_t>(count);
    if (peer == Peer::dribbling) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  peer_bytes = at;
  // A client that has sent its body waits for the answer.
  if (direction == Direction::receive && at == size) recv(end, data.data(), step, 0);
  if (peer == Peer::reset) {
    const linger now{1, 0};
    setsockopt(end, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }
  if (peer == Peer::half_closed) {
    shutdown(end, SHUT_WR);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  close(end);
}

void Case::finish(const Outcome& outcome) {
  require(outcome.moved <= size, "more moved than there is");
  if (outcome.error == job_done) require(outcome.moved == (shortened ? shortened : size), "done before its end");
  if (direction == Direction::receive) {
    std::size_t at = 0;
    for (const auto piece : memory) {
      const std::size_t count = std::min(piece.size(), outcome.moved - at);
      require(std::equal(piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(count), content.begin() + static_cast<std::ptrdiff_t>(at)), "other bytes came than were sent");
      at += count;
    }
  }
  // Nobody may touch these any more.
  pieces.clear();
  if (file >= 0) close(file);
  close(socket);
  thread.join();
  require(is_peer_right, "the peer got other bytes than it was sent");
  const bool reads_all = direction != Direction::receive && (peer == Peer::whole || peer == Peer::stalled);
  if (reads_all) require(peer_bytes == outcome.moved, "the peer got more or less than moved");
  const bool has_fault = peer == Peer::cut || peer == Peer::reset || peer == Peer::half_closed || shrinks;
  if (!has_fault && owner != Owner::stopping) require(outcome.error == job_done, "a fault without a reason");
}

void fill(Rng& rng, Case& made) {
  if (made.direction == Direction::send_file) {
    made.file = memfd_create("body", 0);
    require(write(made.file, content.data(), made.size) == static_cast<ssize_t>(made.size), "write");
    return;
  }
  for (std::size_t at = 0; at < made.size;) {
    const std::size_t size = std::min<std::size_t>(made.size - at, rng() % 4 ? 64 << 10 : 1 + rng() % 5000);
    auto& piece = made.pieces.emplace_back(new std::uint8_t[size]);
    if (made.direction == Direction::send) std::copy_n(content.begin() + static_cast<std::ptrdiff_t>(at), size, piece.get());
    made.memory.emplace_back(piece.get(), size);
    at += size;
  }
}

// Starts a case. False if it was over at once.
bool start(Rng& rng, Mover& mover, Case& made) {
  made.direction = static_cast<Direction>(rng() % 3);
  made.peer = static_cast<Peer>(rng() % 6);
  made.owner = static_cast<Owner>(rng() % 3);
  // So that owners find jobs that are under way.
  if (made.owner != Owner::patient && rng() % 2) made.peer = Peer::dribbling;
  made.size = rng() % 3 ? 1 + rng() % size_max : 1 + rng() % 3000;
  made.cut = rng() % made.size;
  made.shrinks = made.direction == Direction::send_file && rng() % 4 == 0;
  fill(rng, made);
  int ends[2];
  pair_of(rng, ends);
  made.socket = ends[0];
  made.thread = std::thread(&Case::play_peer, &made, ends[1]);
  const bool is_sent = made.direction != Direction::receive;
  const std::size_t wake_bytes = rng() % 2 ? 256 << 10 : 0;
  const Outcome begun = mover.start({.direction = made.direction, .socket = made.socket, .size = made.size, .memory = made.memory,
                                     .file = made.file, .wake_bytes = is_sent ? 0 : wake_bytes, .slice_bytes = is_sent ? slice_bytes : 0});
  made.id = begun.id;
  if (!begun.id) made.finish(begun);
  return begun.id != 0;
}

// What an owner does besides waiting. True if the job is over with it.
bool meddle(Rng& rng, Mover& mover, Case& made) {
  // Whole pages: of one that is on its way the kernel would overwrite what is behind the new end.
  if (made.shrinks && rng() % 2) require(ftruncate(made.file, static_cast<off_t>(made.cut / 4096 * 4096)) == 0, "ftruncate");
  if (made.owner == Owner::patient) return false;
  const std::size_t moved = mover.progress(made.id).moved;
  require(moved <= made.size, "progress beyond the end");
  if (made.owner == Owner::shortening && made.direction != Direction::receive && !made.shortened && moved) {
    const std::size_t stop = (moved / slice_bytes + 1 + rng() % 2) * slice_bytes;
    if (stop < made.size && mover.progress(made.id).moved < stop && mover.shorten(made.id, stop)) {
      // One that had ended by then went as far as it would.
      if (mover.progress(made.id).moved <= stop) made.shortened = stop;
    }
  }
  if (made.owner == Owner::stopping && rng() % (moved ? 3 : 30) == 0) {
    const Outcome outcome = mover.stop(made.id);
    require(outcome.id == made.id, "another job was stopped");
    made.finish(outcome);
    return true;
  }
  return false;
}

void batch(Rng& rng, Mover& mover) {
  std::vector<std::unique_ptr<Case>> cases;
  for (int i = 0; i < jobs_at_once; ++i) {
    auto made = std::make_unique<Case>();
    if (start(rng, mover, *made) && !(rng() % 2 && meddle(rng, mover, *made))) cases.push_back(std::move(made));
  }
  while (!cases.empty()) {
    pollfd ready{mover.descriptor(), POLLIN, 0};
    poll(&ready, 1, rng() % 8 ? 0 : 1);
    for (const Outcome& outcome : mover.take()) {
      const auto found = std::ranges::find(cases, outcome.id, [](const auto& one) { return one->id; });
      require(found != cases.end(), "an outcome of no job");
      (*found)->finish(outcome);
      cases.erase(found);
    }
    std::erase_if(cases, [&](const auto& one) { return rng() % 2 && meddle(rng, mover, *one); });
  }
  require(mover.take().empty(), "an outcome too many");
}

}  // namespace

int main(int, char** arguments) {
  std::signal(SIGPIPE, SIG_IGN);
  Rng rng(std::strtoull(arguments[2], nullptr, 10));
  const int batches = std::atoi(arguments[1]);
  Mover mover;
  for (int i = 0; i < batches; ++i) batch(rng, mover);
  // One that is destroyed with jobs under way touches nothing later.
  {
    Mover last;
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "socketpair");
    Bytes memory(1 << 20);
    last.start({.direction = Direction::receive, .socket = ends[0], .size = memory.size(), .memory = {memory}});
  }
  std::printf("%d batches\n", batches);
}
