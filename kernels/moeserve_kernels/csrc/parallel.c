/* torch's own OpenMP threads are used, found at run time by name: a second pool would compete with
 * the first, whose idle threads spin for milliseconds. Where torch has another runtime than GNU's
 * (whose entry point this is), tasks run on the calling thread. */
#define _GNU_SOURCE
#include "parallel.h"

#include <dlfcn.h>
#include <stdatomic.h>

typedef void (*gomp_parallel_fn)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    task_fn task;
    void *context;
    size_t num_tasks;
    atomic_size_t next;
} TaskList;

static void take_tasks(void *argument) {
    TaskList *list = argument;
    size_t index;
    while ((index = atomic_fetch_add_explicit(&list->next, 1, memory_order_relaxed)) <
           list->num_tasks)
        list->task(list->context, index);
}

void run_tasks(task_fn task, void *context, size_t num_tasks, unsigned num_threads) {
    static _Atomic(gomp_parallel_fn) parallel = NULL;
    TaskList list = {.task = task, .context = context, .num_tasks = num_tasks};
    atomic_init(&list.next, 0);
    if (num_threads > num_tasks) num_threads = (unsigned)num_tasks;
    gomp_parallel_fn start = parallel;
    if (num_threads > 1 && start == NULL) {
        start = (gomp_parallel_fn)dlsym(RTLD_DEFAULT, "GOMP_parallel");
        parallel = start;
    }
    if (num_threads > 1 && start != NULL)
        start(take_tasks, &list, num_threads, 0);
    else
        take_tasks(&list);
}
