/* Notes the native frames of some threads every so many microseconds, for memory_frames.py.

   A timer for each thread sends it a signal, whose handler walks the stack. Some kernels of a CPU
   describe their frames wrongly: a walk that fails is given up. Names are looked up afterwards,
   each address once. Linux with glibc. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define MOST 60000
#define DEPTH 48
#define THREADS 8
#define SIGNAL (SIGRTMIN + 3)
#define HANDLER_FRAMES 2 /* the handler itself, and what the kernel returns to */

static void *frames[MOST][DEPTH];
static int depths[MOST], phases[MOST];
static volatile int count, phase;
static timer_t timers[THREADS];
static int watched;
static struct sigaction before; /* of errors that are not ours */
static __thread sigjmp_buf given_up;
static __thread volatile int walks;

static void fault(int signal) {
  if (walks) siglongjmp(given_up, 1);
  sigaction(signal, &before, NULL); /* what has failed fails again, without us */
}

static void note(int signal) {
  (void)signal;
  if (!phase) return;
  int at = __sync_fetch_and_add(&count, 1);
  if (at >= MOST) return;
  phases[at] = phase;
  depths[at] = 0;
  walks = 1;
  if (!sigsetjmp(given_up, 1)) depths[at] = backtrace(frames[at], DEPTH);
  walks = 0;
}

void frames_begin(void) {
  void *here[1];
  backtrace(here, 1); /* loads what walking takes, which a handler must not do */
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  sigaction(SIGNAL, &action, NULL);
  action.sa_handler = fault;
  sigaction(SIGSEGV, &action, &before);
  count = 0;
}

/* 0, or not 0 where there is no timer for this thread. */
int frames_watch(int thread, long every_us) {
  if (watched == THREADS) return -1;
  struct sigevent event;
  memset(&event, 0, sizeof event);
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGNAL;
  event._sigev_un._tid = thread;
  if (timer_create(CLOCK_MONOTONIC, &event, &timers[watched])) return -1;
  struct itimerspec every = {{0, every_us * 1000}, {0, every_us * 1000}};
  return timer_settime(timers[watched++], 0, &every, NULL);
}

void frames_stop(void) {
  while (watched) timer_delete(timers[--watched]);
  sigaction(SIGSEGV, &before, NULL);
}

/* 0: nothing is noted. */
void frames_phase(int now) { phase = now; }

int frames_count(void) { return count < MOST ? count : MOST; }

/* A line each: its phase, and the addresses of its frames, the innermost first. */
int frames_write(const char *path) {
  FILE *file = fopen(path, "w");
  if (file == NULL) return -1;
  for (int at = 0; at < frames_count(); at++) {
    fprintf(file, "%d", phases[at]);
    for (int frame = HANDLER_FRAMES; frame < depths[at]; frame++)
      fprintf(file, " %lx", (unsigned long)frames[at][frame]);
    fputc('\n', file);
  }
  return fclose(file);
}

/* "LIBRARY!SYMBOL" of an address; "?" stands for what is not known. */
void frames_name(unsigned long address, char *to, int size) {
  Dl_info found;
  memset(&found, 0, sizeof found);
  if (!dladdr((void *)address, &found) || found.dli_fname == NULL) {
    snprintf(to, size, "?!?");
    return;
  }
  const char *slash = strrchr(found.dli_fname, '/');
  snprintf(to, size, "%s!%s", slash ? slash + 1 : found.dli_fname,
           found.dli_sname ? found.dli_sname : "?");
}
