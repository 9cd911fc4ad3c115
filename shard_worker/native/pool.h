// A fixed set of threads for work that is split by index. The caller is one of them.
//
// Rules: work is handed out once per run, part i to thread i; a thread that waits spins for at most 20 us and
// then sleeps in the kernel, so an idle pool costs nothing; a pool of one calls straight through. One run at
// a time: a pool has one owner. `work` must not call back into the same pool and must not throw.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

typedef struct shoal_pool shoal_pool;

// `threads` counts the caller; NULL if it is not in 1..256 or a thread cannot be started.
shoal_pool *shoal_pool_create(int threads);

// No run may be under way.
void shoal_pool_destroy(shoal_pool *pool);

int shoal_pool_threads(const shoal_pool *pool);

// Calls work(arg, part, parts) once for each part in [0, parts), parts = threads of the pool, the caller's
// part being 0. Returns when all are done; what they wrote is visible to the caller.
void shoal_pool_run(shoal_pool *pool, void (*work)(void *arg, int part, int parts), void *arg);

#ifdef __cplusplus
}
#endif
