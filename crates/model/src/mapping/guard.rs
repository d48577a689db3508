//! What happens if a mapped file loses bytes while it is in use: reading one that is gone raises SIGBUS, which by itself
//! ends the process. Here the lost part of the mapping is replaced by zeros and noted, the read goes on, and whoever
//! uses the bytes asks before trusting what was computed. On systems without this signal a mapped file cannot be cut
//! off.
//!
//! The handler runs on whichever thread read, at any point, so it touches only atomics and calls only `mmap` and
//! `sigaction`. It answers for watched mappings; any other SIGBUS gets the action that was there before.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings that are watched at the same time; further ones are not.
const SLOTS: usize = 256;

static WATCHED: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];
/// What SIGBUS did before, and the size of a page.
static BEFORE: OnceLock<(libc::sigaction, usize)> = OnceLock::new();

/// A watched mapping: addresses `start..end`, or nothing where `end` is 0.
struct Slot {
    taken: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

impl Slot {
    const fn new() -> Self {
        Slot {
            taken: AtomicBool::new(false),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }
}

/// Watches a mapping for as long as it lives; it has to be dropped before the mapping is.
pub(super) struct Guard(Option<&'static Slot>);

impl Guard {
    /// Watches a mapping of a file.
    pub fn new(mapping: &[u8]) -> Self {
        install();
        let free = |slot: &&Slot| !slot.taken.swap(true, Ordering::AcqRel);
        let slot = WATCHED.iter().find(free);
        if let Some(slot) = slot {
            slot.lost.store(false, Ordering::Release);
            slot.start.store(mapping.as_ptr() as usize, Ordering::Release);
            slot.end.store(mapping.as_ptr() as usize + mapping.len(), Ordering::Release);
        }
        Guard(slot)
    }

    /// Whether bytes of the file were found to be gone.
    pub fn lost(&self) -> bool {
        self.0.is_some_and(|slot| slot.lost.load(Ordering::Acquire))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.end.store(0, Ordering::Release);
            slot.taken.store(false, Ordering::Release);
        }
    }
}

/// Puts the handler in place, once.
fn install() {
    BEFORE.get_or_init(|| {
        let mut before = MaybeUninit::zeroed();
        // SAFETY: zeros are a valid action, whose fields are then set; the handler has the type that SA_SIGINFO asks
        // for and does only what a handler may. A refusal leaves things as they were.
        unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE).max(1) as usize;
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &action, before.as_mut_ptr());
            (before.assume_init(), page)
        }
    });
}

extern "C" fn on_bus_error(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the system hands over a valid description of the signal.
    let address = unsafe { (*info).si_addr() } as usize;
    // The fault may come before `get_or_init` has returned only if another thread already reads a mapping, and no
    // mapping is watched before that.
    let Some((before, page)) = BEFORE.get() else { return };
    for slot in &WATCHED {
        let (start, end) = (slot.start.load(Ordering::Acquire), slot.end.load(Ordering::Acquire));
        if !(start..end).contains(&address) {
            continue;
        }
        // What lies behind a byte that is gone is gone too, or will not be trusted.
        let first = address / page * page;
        // SAFETY: the pages are those of a watched mapping, which nothing else lies in. They become zeros that can be
        // read, as the mapping's type promises.
        let zeros = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            libc::mmap(first as *mut c_void, end - first, libc::PROT_READ, flags, -1, 0)
        };
        if zeros != libc::MAP_FAILED {
            slot.lost.store(true, Ordering::Release);
            return;
        }
    }
    // Not ours: the read is repeated under the action that was there before.
    // SAFETY: it was valid when it was replaced.
    unsafe { libc::sigaction(libc::SIGBUS, before, ptr::null_mut()) };
}
