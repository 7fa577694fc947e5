// The process's one pool of worker threads, for CPU kernels: ours and the user's.
//
// parallel_for gives each thread a contiguous share of the tasks; a thread that is done takes
// tasks from the others' shares. Which thread runs a task is therefore not fixed: a kernel that
// wants the same bits on any number of threads cuts its work into tasks by the shape alone.
// Two calls in a row with the same number of tasks give a thread the same share again, so what
// it left in its cache is found there.
//
// Workers spin for about 50 us after a task, then sleep. A call never waits for a worker that has
// not yet begun: on a busy machine the caller does the work itself.
//
// Threads    Every function may be called from any thread at any time. While one host thread is
//            inside parallel_for, a second one's call (and a nested call) runs on the thread that
//            made it. After fork() the child starts its own workers on first use; as with every
//            library that locks, no other thread may be inside mlxtape when fork is called.
#pragma once

#include <cstdint>

#include "mlxtape/base/function_ref.h"

namespace mlxtape {

// How many threads work on one call, the caller included. 0 asks for one per core this process
// may run on, which is also the default. Throws kArgument outside [0, 1024].
void set_threads(int count);
int threads();

// Calls body(task) once for each task in [0, tasks) and returns when all are done. If bodies throw,
// one of the exceptions is thrown again here, after every task has ended or been skipped.
void parallel_for(std::int64_t tasks, FunctionRef<void(std::int64_t)> body);

}  // namespace mlxtape
