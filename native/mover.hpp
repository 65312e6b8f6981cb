// Moves bodies between non-blocking sockets and memory or files, in a thread of its own that knows no Python.
//
// A *job* is so many bytes of one socket in one direction. Who starts it keeps its socket, file and memory as they are until
// the job is taken as done or has been stopped: `stop` returns only when the thread touches none of them any more. How long a
// job may take is the caller's to say; the thread waits for sockets and has no clock but for noting progress.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include <sys/types.h>

namespace kvtide {

enum class Direction { receive, send, send_file };

struct Job {
  Direction direction{};
  int socket = -1;
  std::size_t size = 0;
  // Memory to fill or to send, `size` bytes in sum; of a file its descriptor and the place in it instead.
  std::vector<std::span<std::uint8_t>> memory{};
  int file = -1;
  off_t offset = 0;
  // The thread wakes when so much has come, or the rest; 0 for sockets that can't be told.
  std::size_t wake_bytes = 0;
  // No call goes beyond a multiple of this, so that a job can be shortened to one while it moves; 0 if it never is.
  std::size_t slice_bytes = 0;
};

// What `Outcome::error` is, if it is no errno. `ended`: the peer closed before all had come, or the file ended.
constexpr int job_done = 0;
constexpr int job_ended = -1;
constexpr int job_stopped = -2;

struct Outcome {
  std::uint64_t id = 0;
  std::size_t moved = 0;
  int error = job_done;
};

struct Progress {
  std::size_t moved = 0;
  // On CLOCK_MONOTONIC, when a job last moved; its start if it has not.
  std::int64_t moved_ns = 0;
};

class Mover {
 public:
  // std::system_error if there is no descriptor or thread left.
  Mover();
  // Ends the thread; jobs that are under way are given up.
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // Readable while outcomes wait to be taken.
  int descriptor() const { return done_.descriptor; }

  // Starts a job. With an id of 0 it was done, or failed, at once: jobs of at most `at_once_bytes_max` are tried right here.
  Outcome start(Job job);
  // What has ended since the last call.
  std::vector<Outcome> take();
  // Ends a job that is under way or done and not taken. `job_stopped` if it was not done.
  Outcome stop(std::uint64_t id);
  // Receives what has come and was too little to wake for.
  Progress progress(std::uint64_t id);
  // Lets a job end after `size` bytes, whole slices. False if it is that far, or has ended beyond it.
  bool shorten(std::uint64_t id, std::size_t size);

  static constexpr std::size_t at_once_bytes_max = 64 << 10;

 private:
  struct Owned {
    Owned() = default;
    ~Owned();
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    int descriptor = -1;
  };
  struct Running;

  void run();
  void step(const std::shared_ptr<Running>& running, std::unique_lock<std::mutex>& lock);
  void wait_for(Running& running);
  void tell(std::unique_lock<std::mutex>& lock);
  void end(Running& running);
  void leave(Running& running);

  Owned poll_, wake_, done_;
  std::mutex mutex_;
  // Tells those who stop a job that the thread is through with it.
  std::condition_variable stepped_;
  std::map<std::uint64_t, std::shared_ptr<Running>> jobs_;
  // To be moved without waiting.
  std::deque<std::shared_ptr<Running>> started_;
  std::vector<Outcome> outcomes_;
  std::uint64_t last_id_ = 0;
  // Whether the thread has to be woken, and whether who takes outcomes has been told that there are some.
  bool is_asleep_ = false;
  bool is_told_ = false;
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace kvtide
