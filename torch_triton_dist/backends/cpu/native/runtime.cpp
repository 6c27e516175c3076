// Runtime library of the CPU backend, shared by all kernels of a process: a thread pool, program arenas, polling, a clock.
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include <vector>

typedef void (*Body)(const void*, int64_t, int64_t, char*);

namespace {

// One launch. Lives on the stack of the thread that launches; workers help it until no program is left.
struct Job {
  Body body;
  const void* args;
  int64_t programs, chunk, arena_bytes;
  int64_t next = 0;    // first program that nobody has taken
  int helpers_wanted;  // workers that may still join
  int helpers = 0;     // workers inside
};

// Scratch memory of the calling thread for one program at a time.
struct Arena {
  char* data = nullptr;
  int64_t bytes = 0;
  ~Arena() { free(data); }
  char* get(int64_t wanted) {
    if (wanted > bytes) {
      free(data);
      bytes = (wanted + 4095) / 4096 * 4096;
      data = (char*)aligned_alloc(4096, size_t(bytes));
      if (!data) abort();
    }
    return data;
  }
};
thread_local Arena arena;

void run(Job& job) {
  while (true) {
    const int64_t begin = __atomic_fetch_add(&job.next, job.chunk, __ATOMIC_RELAXED);
    if (begin >= job.programs) return;
    const int64_t end = begin + job.chunk;
    // A kernel may launch nothing itself, so the arena is ours until the body returns.
    job.body(job.args, begin, end < job.programs ? end : job.programs, arena.get(job.arena_bytes));
  }
}

struct Pool {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t work = PTHREAD_COND_INITIALIZER;  // a job wants helpers
  pthread_cond_t left = PTHREAD_COND_INITIALIZER;  // a helper has left its job
  std::vector<Job*> jobs;
  int workers = 0;

  void serve() {
    pthread_mutex_lock(&lock);
    while (true) {
      Job* job = nullptr;
      for (Job* candidate : jobs)
        if (candidate->helpers_wanted > 0) job = candidate;
      if (!job) {
        pthread_cond_wait(&work, &lock);
        continue;
      }
      --job->helpers_wanted;
      ++job->helpers;
      pthread_mutex_unlock(&lock);
      run(*job);
      pthread_mutex_lock(&lock);
      --job->helpers;
      pthread_cond_broadcast(&left);
    }
  }

  static void* worker(void* pool) {
    ((Pool*)pool)->serve();
    return nullptr;
  }

  void launch(Job& job) {
    pthread_mutex_lock(&lock);
    while (workers < job.helpers_wanted) {
      pthread_t thread;
      pthread_attr_t attributes;
      pthread_attr_init(&attributes);
      pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
      const int failed = pthread_create(&thread, &attributes, worker, this);
      pthread_attr_destroy(&attributes);
      if (failed) break;  // fewer threads: slower, still right
      ++workers;
    }
    jobs.push_back(&job);
    pthread_mutex_unlock(&lock);
    pthread_cond_broadcast(&work);
    run(job);
    pthread_mutex_lock(&lock);
    job.helpers_wanted = 0;
    for (size_t i = 0; i < jobs.size(); ++i)
      if (jobs[i] == &job) jobs.erase(jobs.begin() + long(i));
    while (job.helpers) pthread_cond_wait(&left, &lock);
    pthread_mutex_unlock(&lock);
  }
};

// Never destroyed: workers wait in it until the process ends. A forked child has no workers, so it gets a new pool.
Pool* pool = nullptr;
void renew_pool() { pool = new Pool; }

struct AtLoad {
  AtLoad() {
    renew_pool();
    pthread_atfork(nullptr, nullptr, renew_pool);
  }
} at_load;

// Runs body over [0, programs) on the calling thread and up to threads - 1 helpers. Programs start in ascending order, and the
// result must not depend on any two of them running at once: a single thread runs them one after the other.
void parallel_for(Body body, const void* args, int64_t programs, int threads, int64_t arena_bytes) {
  if (programs <= 0) return;
  if (threads > programs) threads = int(programs);
  Job job;
  job.body = body;
  job.args = args;
  job.programs = programs;
  job.arena_bytes = arena_bytes > 0 ? arena_bytes : 64;
  if (threads <= 1) {
    job.chunk = programs;
    run(job);
    return;
  }
  job.chunk = programs / (int64_t(threads) * 16);  // a few chunks a thread: balance without contention
  if (job.chunk < 1) job.chunk = 1;
  job.helpers_wanted = threads - 1;
  pool->launch(job);
}

// Called before each look of a loop that waits for memory to change. Peers may need this very core to make progress.
void poll(unsigned* polls) {
  const unsigned n = (*polls)++;
  if (n == 0) return;
  if (n < 32) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  } else if (n < 4096) {
    sched_yield();
  } else {
    const timespec nap = {0, 20000};
    nanosleep(&nap, nullptr);
  }
}

int64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

}  // namespace

// Layout: struct Runtime in prelude.h.
extern "C" const struct {
  void (*parallel_for)(Body, const void*, int64_t, int, int64_t);
  void (*poll)(unsigned*);
  int64_t (*clock_ns)();
} ttd_runtime_table = {parallel_for, poll, clock_ns};
