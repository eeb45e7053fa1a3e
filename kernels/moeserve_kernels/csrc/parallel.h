/* Tasks on the threads that torch uses too. */
#ifndef MOESERVE_PARALLEL_H
#define MOESERVE_PARALLEL_H

#include <stddef.h>

/* One task: `context` is shared by all, `index` is this one's. */
typedef void (*task_fn)(void *context, size_t index);

/* Runs tasks 0 to num_tasks - 1, each once, on up to num_threads threads; returns when all are
 * done. A thread takes the next task when it has finished one. */
void run_tasks(task_fn task, void *context, size_t num_tasks, unsigned num_threads);

#endif
