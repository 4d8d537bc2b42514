//! A mapped file that becomes shorter while it is read: zeros and a mark, where the system would
//! end the process.
//!
//! Reading a page of a mapping that its file no longer reaches raises SIGBUS. A handler, installed
//! with the first mapping, looks whether the address lies in one of ours. If so it marks the
//! mapping as damaged and puts zeros in the place of all that is left of it, so that the read goes
//! on; whoever read asks for the mark when done. Any other fault is the former handler's, or ends
//! the process as before.
//!
//! This is the one place outside the device layer with foreign functions: no safe code survives
//! such a read, and whoever maps a file needs it. On systems other than Linux and Apple's, a file
//! that shrinks ends the process, as it does by default.

use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Watches over a range of addresses that a file is mapped to, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Guard(&'static Watched);

/// A range in the list that the handler walks. It is never freed nor used again: a handler may look
/// at it at any time. It takes some 40 bytes for each file ever opened.
#[derive(Debug)]
struct Watched {
    #[cfg_attr(
        not(any(target_os = "linux", target_vendor = "apple")),
        expect(dead_code, reason = "no handler looks at it")
    )]
    range: Range<usize>,
    /// Whether the file is still mapped there.
    live: AtomicBool,
    damaged: AtomicBool,
    next: *mut Watched,
}

// SAFETY: what changes is atomic, and `next` points to a `Watched` that is never freed.
unsafe impl Sync for Watched {}

/// The latest range; each leads to those before it.
static LATEST: AtomicPtr<Watched> = AtomicPtr::new(null_mut());

impl Guard {
    /// Watches over the addresses of `bytes`, which are a file's.
    pub(crate) fn over(bytes: &[u8]) -> Guard {
        #[cfg(any(target_os = "linux", target_vendor = "apple"))]
        handler::install();
        let addresses = bytes.as_ptr_range();
        let watched = Box::into_raw(Box::new(Watched {
            range: addresses.start as usize..addresses.end as usize,
            live: AtomicBool::new(true),
            damaged: AtomicBool::new(false),
            next: LATEST.load(Ordering::Acquire),
        }));
        loop {
            // SAFETY: nobody else has the pointer until it is in the list.
            let next = unsafe { (*watched).next };
            match LATEST.compare_exchange(next, watched, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: it is never freed, and from now on only its atomics change.
                Ok(_) => return Guard(unsafe { &*watched }),
                // SAFETY: as above, it is not in the list yet.
                Err(latest) => unsafe { (*watched).next = latest },
            }
        }
    }

    /// Whether something that was read there was not the file's.
    pub(crate) fn damaged(&self) -> bool {
        self.0.damaged.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.live.store(false, Ordering::SeqCst);
    }
}

#[cfg(any(target_os = "linux", target_vendor = "apple"))]
mod handler {
    use super::{LATEST, Watched};
    use std::ptr::null_mut;
    use std::sync::Once;
    use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

    /// The action that SIGBUS had before.
    static FORMER: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());
    /// Bytes of a page.
    static PAGE: AtomicUsize = AtomicUsize::new(0);

    /// Installs the handler once.
    pub(super) fn install() {
        static DONE: Once = Once::new();
        DONE.call_once(|| {
            // SAFETY: it asks for a number.
            let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            PAGE.store(usize::try_from(page).unwrap_or(0), Ordering::Release);
            // SAFETY: the struct is plain data, for which zeros are valid.
            let mut former: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: both calls get structs that live through them. The new action is a function
            // of the signature that SA_SIGINFO asks for, which does only what a handler may: see
            // `on_fault`. The former action is in place before the new one can be asked for it.
            unsafe {
                if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut former) != 0 {
                    return;
                }
                FORMER.store(Box::into_raw(Box::new(former)), Ordering::Release);
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigemptyset(&mut action.sa_mask);
                // A system that refuses leaves things as they were.
                libc::sigaction(libc::SIGBUS, &action, null_mut());
            }
        });
    }

    /// The handler. It may interrupt anything, so it takes no lock, allocates nothing and calls
    /// nothing but `mmap` and `sigaction`, which are system calls without state of their own in the
    /// process.
    extern "C" fn on_fault(
        signal: libc::c_int,
        info: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        // SAFETY: the system passes a valid struct, whose address is set for this signal.
        let address = unsafe { (*info).si_addr() } as usize;
        if watched(address).is_some_and(|watched| replace(watched, address)) {
            return;
        }
        let former = FORMER.load(Ordering::Acquire);
        // SAFETY: it is null or was leaked by `install`, and nobody writes to it.
        let action = unsafe { former.as_ref() }.map_or(libc::SIG_DFL, |former| former.sa_sigaction);
        if action == libc::SIG_DFL || action == libc::SIG_IGN {
            // The instruction that faulted runs again behind this, and ends the process as if there
            // were no handler. SAFETY: zeros are a valid action: the default one, without flags,
            // and nothing masked.
            unsafe {
                let default: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, &default, null_mut());
            }
            return;
        }
        // SAFETY: `action` is not null: a former action was there.
        let flags = unsafe { (*former).sa_flags };
        type Full = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
        type Plain = extern "C" fn(libc::c_int);
        if flags & libc::SA_SIGINFO != 0 {
            // SAFETY: with this flag the former action is a function of this signature; it gets
            // what we got.
            let handler: Full = unsafe { std::mem::transmute(action) };
            handler(signal, info, context);
        } else {
            // SAFETY: without it, the former action is a function of the signal's number alone.
            let handler: Plain = unsafe { std::mem::transmute(action) };
            handler(signal);
        }
    }

    /// The mapping that an address lies in.
    fn watched(address: usize) -> Option<&'static Watched> {
        let mut next = LATEST.load(Ordering::Acquire);
        // SAFETY: what is in the list is never freed, and only its atomics change.
        while let Some(watched) = unsafe { next.as_ref() } {
            if watched.range.contains(&address) && watched.live.load(Ordering::SeqCst) {
                return Some(watched);
            }
            next = watched.next;
        }
        None
    }

    /// Puts zeros in the place of the mapping from the page of `address` on, and marks it. False if
    /// the system refuses.
    ///
    /// All of the rest and not one page: a file that ends before this page has none of those behind
    /// it either, and a fault for each of a model's pages would take seconds.
    fn replace(watched: &Watched, address: usize) -> bool {
        let page = PAGE.load(Ordering::Acquire);
        if page == 0 {
            return false;
        }
        watched.damaged.store(true, Ordering::Release);
        let (start, end) = (address / page * page, watched.range.end.next_multiple_of(page));
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let error = errno();
        // SAFETY: the addresses are those of whole pages of a mapping that is still there, since
        // somebody reads it, and that is only ever read: it holds no Rust object but bytes, for
        // which zeros are valid. What unmaps it later unmaps addresses, whatever lies there.
        // `errno` is as the interrupted code had it.
        unsafe {
            let zeros = libc::mmap(start as *mut _, end - start, libc::PROT_READ, flags, -1, 0);
            *error.0 = error.1;
            zeros != libc::MAP_FAILED
        }
    }

    /// Where this thread's `errno` lies, and its value.
    fn errno() -> (*mut libc::c_int, libc::c_int) {
        // SAFETY: each of these gives the address of the calling thread's own variable.
        unsafe {
            #[cfg(target_os = "linux")]
            let place = libc::__errno_location();
            #[cfg(target_vendor = "apple")]
            let place = libc::__error();
            (place, *place)
        }
    }
}

#[cfg(all(test, any(target_os = "linux", target_vendor = "apple")))]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use crate::map::Map;

    const PAGE: usize = 64 << 10;

    /// A file of `count` pages of ones.
    fn pages(count: usize) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![1; count * PAGE]).unwrap();
        file
    }

    #[test]
    fn a_file_that_shrinks_reads_as_zeros_and_is_told() {
        for (kept, first, why) in [
            (0, 0, "nothing is left"),
            (1, 63, "the last page"),
            (31, 31, "the first page that is gone"),
        ] {
            let (shrinking, other) = (pages(64), pages(64));
            let (map, sound) =
                (Map::open(shrinking.path()).unwrap(), Map::open(other.path()).unwrap());
            assert!(map.whole().is_ok(), "{why}");
            shrinking.as_file().set_len((kept * PAGE) as u64).unwrap();
            assert_eq!(map.bytes()[first * PAGE + 5], 0, "{why}");
            // From several threads at once, also those that come late.
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| assert!(map.bytes()[first * PAGE..].iter().all(|&b| b == 0)));
                }
            });
            map.release(map.bytes());
            map.touch(map.bytes());
            assert!(map.bytes()[kept * PAGE..].iter().all(|&b| b == 0), "{why}");
            let error = map.whole().unwrap_err().to_string();
            let found = format!(
                "expected {} bytes, found {}: the file became shorter while it was read",
                64 * PAGE,
                kept * PAGE
            );
            assert!(
                error.contains(&found) && error.contains(map.path().to_str().unwrap()),
                "{error}"
            );
            assert!(sound.bytes().iter().all(|&b| b == 1) && sound.whole().is_ok());
            drop(map);
            assert!(
                Map::open(other.path()).unwrap().whole().is_ok(),
                "at addresses that are free again"
            );
        }
    }

    /// Faults in a mapping that is not ours, if the process was started for that.
    #[test]
    fn faults_elsewhere_in_a_process_of_its_own() {
        if std::env::var_os("DELFT_TEST_FAULT").is_none() {
            return;
        }
        let (ours, file) = (pages(1), pages(4));
        let _map = Map::open(ours.path()).unwrap();
        // SAFETY: the test is what happens to those who change a mapped file.
        let other = unsafe { memmap2::Mmap::map(file.as_file()) }.unwrap();
        file.as_file().set_len(0).unwrap();
        std::hint::black_box(other[2 * PAGE]);
    }

    #[test]
    fn a_fault_in_another_mapping_ends_the_process_as_before() {
        let name = "fault::tests::faults_elsewhere_in_a_process_of_its_own";
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env("DELFT_TEST_FAULT", "1")
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(libc::SIGBUS), "{child:?}");
    }
}
