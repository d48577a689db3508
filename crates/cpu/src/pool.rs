//! A fixed pool of threads that run one function together, phase by phase.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use engine::BackendError;

/// Checks of an atomic before a waiting thread sleeps: some 50 microseconds.
const SPINS: u32 = 2000;

/// Threads, of which the caller is the first.
pub struct Pool {
    team: Arc<Team>,
    workers: Vec<JoinHandle<()>>,
}

/// What the threads share.
pub struct Team {
    threads: usize,
    /// Number of jobs handed out.
    epoch: Signal,
    job: UnsafeCell<Option<Job>>,
    /// Threads that arrived at the barrier, and how often all have.
    arrived: AtomicU32,
    passed: Signal,
    /// Threads that are through with the job, and how often all were.
    left: AtomicU32,
    ended: Signal,
    /// Whether a thread panicked in this job: no barrier will see them all.
    broken: AtomicBool,
    stop: AtomicBool,
}

/// A thread panicked, and the job was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Panicked;

impl From<Panicked> for BackendError {
    fn from(_: Panicked) -> Self {
        BackendError::Device("a thread panicked".into())
    }
}

type Job = *const (dyn Fn(usize, &Team) + Sync);

// SAFETY: `job` is written by the caller between barriers only, and read by workers after `epoch` changed.
unsafe impl Sync for Team {}
// SAFETY: as above; the pointer is followed only while the caller of `run` keeps the function alive.
unsafe impl Send for Team {}

impl Pool {
    /// A pool of `threads` threads, the caller's included.
    pub fn new(threads: usize) -> Result<Pool, BackendError> {
        let threads = threads.max(1);
        let team = Arc::new(Team {
            threads,
            epoch: Signal::default(),
            job: UnsafeCell::new(None),
            arrived: AtomicU32::new(0),
            passed: Signal::default(),
            left: AtomicU32::new(0),
            ended: Signal::default(),
            broken: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = Pool { team, workers: Vec::new() };
        for thread in 1..threads {
            let team = Arc::clone(&pool.team);
            let worker = std::thread::Builder::new().name(format!("kipp-cpu-{thread}"));
            let refused = |error| BackendError::Unavailable(format!("thread {thread}: {error}"));
            pool.workers.push(worker.spawn(move || team.work(thread)).map_err(refused)?);
        }
        Ok(pool)
    }

    /// Threads.
    pub fn threads(&self) -> usize {
        self.team.threads
    }

    /// Runs `job` on every thread; returns when all have, or have given up because one panicked.
    pub fn run(&mut self, job: &(dyn Fn(usize, &Team) + Sync)) -> Result<(), Panicked> {
        // SAFETY: all threads are waiting for the epoch to change, so that nobody reads the job; the
        // wait for all of them below keeps `job` alive until all have run it.
        unsafe {
            let job: *const (dyn Fn(usize, &Team) + Sync + '_) = job;
            *self.team.job.get() =
                Some(std::mem::transmute::<*const (dyn Fn(usize, &Team) + Sync + '_), Job>(job));
        }
        self.team.epoch.raise();
        self.team.take_part(0, job);
        match self.team.broken.swap(false, SeqCst) {
            true => Err(Panicked),
            false => Ok(()),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.team.stop.store(true, SeqCst);
        self.team.epoch.raise();
        for worker in self.workers.drain(..) {
            // A worker that panicked has printed its message.
            let _ = worker.join();
        }
    }
}

impl Team {
    /// Threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Waits until all threads are here; unwinds if one never will be.
    pub fn barrier(&self) {
        let passed = self.passed.count();
        self.check();
        if self.arrived.fetch_add(1, SeqCst) + 1 == self.threads as u32 {
            self.arrived.store(0, SeqCst);
            self.passed.raise();
        } else {
            self.passed.wait_beyond(passed);
            self.check();
        }
    }

    /// Leaves the job if another thread panicked in it.
    fn check(&self) {
        if self.broken.load(SeqCst) {
            // Without another message: the one that panicked has printed its own.
            resume_unwind(Box::new(Panicked));
        }
    }

    /// One thread's part in a job; returns when all threads are through with theirs.
    fn take_part(&self, thread: usize, job: &(dyn Fn(usize, &Team) + Sync)) {
        // What the job leaves half done is numbers, which nobody reads after an error.
        if catch_unwind(AssertUnwindSafe(|| job(thread, self))).is_err() {
            self.broken.store(true, SeqCst);
            // Those that wait at a barrier look at it; those that come to one do so first.
            self.passed.raise();
        }
        let ended = self.ended.count();
        if self.left.fetch_add(1, SeqCst) + 1 == self.threads as u32 {
            self.left.store(0, SeqCst);
            self.arrived.store(0, SeqCst);
            self.ended.raise();
        } else {
            self.ended.wait_beyond(ended);
        }
    }

    fn work(&self, thread: usize) {
        let mut epoch = 0;
        loop {
            self.epoch.wait_beyond(epoch);
            epoch = epoch.wrapping_add(1);
            if self.stop.load(SeqCst) {
                return;
            }
            // SAFETY: `run` set the job before it raised the epoch and keeps it until all are through.
            if let Some(job) = unsafe { *self.job.get() } {
                // SAFETY: as above.
                self.take_part(thread, unsafe { &*job });
            }
        }
    }
}

/// A counter that threads wait on: first spinning, then asleep.
#[derive(Default)]
#[repr(align(64))]
struct Signal {
    count: AtomicU32,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    woken: Condvar,
}

impl Signal {
    fn count(&self) -> u32 {
        self.count.load(SeqCst)
    }

    fn raise(&self) {
        self.count.fetch_add(1, SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            // A sleeper between its check and its sleep holds the lock.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.woken.notify_all();
        }
    }

    /// Returns when the counter is no longer `count`.
    fn wait_beyond(&self, count: u32) {
        for _ in 0..SPINS {
            if self.count() != count {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, SeqCst);
        while self.count() == count {
            guard = self.woken.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }
}

/// Hands out the units of one phase: each thread takes those of its own range in order, then helps
/// where others are behind.
pub struct Shares {
    /// Next unit of each thread's range, a cache line apart.
    next: Vec<Counter>,
}

#[derive(Default)]
#[repr(align(64))]
struct Counter(AtomicUsize);

impl Shares {
    /// For `threads` threads.
    pub fn new(threads: usize) -> Self {
        Shares { next: (0..threads).map(|_| Counter::default()).collect() }
    }

    /// Forgets what was taken.
    pub fn reset(&self) {
        for counter in &self.next {
            counter.0.store(0, SeqCst);
        }
    }

    /// Calls `work` for units of `0..units` until none is left.
    pub fn take(&self, thread: usize, units: usize, mut work: impl FnMut(usize)) {
        let threads = self.next.len();
        for i in 0..threads {
            let owner = (thread + i) % threads;
            let (start, end) = (units * owner / threads, units * (owner + 1) / threads);
            loop {
                let unit = start + self.next[owner].0.fetch_add(1, SeqCst);
                if unit >= end {
                    break;
                }
                work(unit);
            }
        }
    }
}

/// Physical cores that this process may run on: the threads worth having.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    physical_cores().map_or(allowed, |cores| cores.min(allowed)).max(1)
}

/// Distinct cores among the processors of the affinity mask.
#[cfg(target_os = "linux")]
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = std::collections::BTreeSet::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        for cpu in first.parse::<usize>().ok()?..=last.parse().ok()? {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            // Siblings name the same list; a machine that hides its topology has one core a processor.
            cores.insert(std::fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string()));
        }
    }
    Some(cores.len())
}

#[cfg(not(target_os = "linux"))]
fn physical_cores() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever panics, wherever the others are: the job ends with an error, and the next one runs.
    #[test]
    fn a_panic_ends_the_job_and_not_the_pool() {
        let phases = 5;
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads).expect("threads");
            for (culprit, when) in (0..threads).flat_map(|t| (0..phases).map(move |p| (t, p))) {
                let broken = pool.run(&|thread, team| {
                    for phase in 0..phases {
                        assert!((thread, phase) != (culprit, when), "planted");
                        team.barrier();
                    }
                });
                assert_eq!(broken, Err(Panicked));
                let done = AtomicUsize::new(0);
                let whole = pool.run(&|_, team| {
                    for _ in 0..phases {
                        team.barrier();
                        done.fetch_add(1, SeqCst);
                    }
                });
                assert_eq!((whole, done.into_inner()), (Ok(()), threads * phases));
            }
        }
    }
}
