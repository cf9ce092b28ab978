//! Processes in which the system refuses calls that it usually allows.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output};

use highwater_core::{Backend, ErrorKind, EventOptions, Runtime};
use highwater_mock::{MockGpu, MockOptions};

const ROLE: &str = "HIGHWATER_SANDBOX_ROLE";

/// A call to refuse: its number, if any the number and value of one argument, and the error.
struct Refused {
    call: libc::c_long,
    argument: Option<(u32, u32)>,
    error: i32,
}

/// Loads a filter into this process that refuses a call and allows all others.
fn refuse(refused: &Refused) -> std::io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load = |offset: u32| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let unless = |k: u32, jf: u8| {
        let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        libc::sock_filter { code, jt: 0, jf, k }
    };
    let end = |action: u32| statement(libc::BPF_RET | libc::BPF_K, action);
    // `seccomp_data`: the number, the architecture, the instruction, the arguments of 64 bits each.
    let (argument, value) = refused.argument.unwrap_or((0, 0));
    let mut filter = vec![load(0), unless(refused.call as u32, if refused.argument.is_some() { 3 } else { 1 })];
    if refused.argument.is_some() {
        filter.extend([load(16 + 8 * argument), unless(value, 1)]);
    }
    filter.extend([end(libc::SECCOMP_RET_ERRNO | refused.error as u32), end(libc::SECCOMP_RET_ALLOW)]);
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the calls only read their arguments, and the filter lives until they return.
    let loaded = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if loaded { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Runs a role of this file in a process where a call is refused. Ends it after a while.
fn run(role: &str, refused: Refused) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "play", "--nocapture"]).env(ROLE, role);
    // SAFETY: between fork and exec the child only makes system calls and allocates. The system's allocator works in a
    // forked child, whatever other threads of this process do.
    unsafe {
        command.pre_exec(move || {
            libc::alarm(20);
            refuse(&refused)
        })
    };
    command.output().unwrap()
}

/// Not a test by itself: the code of the processes that [`run`] starts.
#[test]
fn play() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "fork" => fork_and_call(),
        "files" => make_files(),
        "sockets" => make_sockets(),
        "mappings" => use_up_mappings(),
        _ => panic!("no such role: {role}"),
    }
}

// -------------------------------------------------------------------- no page is wiped on fork

const REFUSED_WIPE: Refused =
    Refused { call: libc::SYS_madvise, argument: Some((2, libc::MADV_WIPEONFORK as u32)), error: libc::EINVAL };

#[test]
fn a_forked_child_is_noticed_where_no_page_is_wiped() {
    let output = run("fork", REFUSED_WIPE);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("the child was told"), "{output:?}");
}

fn fork_and_call() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let buffer = stream.upload(&[1_u32; 100]).unwrap();
    // SAFETY: the child takes no lock that another thread may hold; the test checks this. It ends with `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: a call that hangs is ended by the signal.
        unsafe { libc::alarm(5) };
        let first = stream.download(&buffer).map(drop);
        let later = runtime.device(0).and_then(|device| device.allocate::<u8>(100)).map(drop);
        let is_forked =
            |result: highwater_core::Result<()>| result.is_err_and(|error| error.kind() == ErrorKind::Forked);
        let told = is_forked(first) && is_forked(later);
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(i32::from(!told)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    let status = std::process::ExitStatus::from_raw(status);
    assert!(status.success(), "the child: {status}");
    assert_eq!(stream.download(&buffer).unwrap(), vec![1; 100], "the parent is undisturbed");
    println!("the child was told");
}

// -------------------------------------------------------------------- no more mappings

/// More mappings than this are not made for a test.
const MOST_MAPPINGS: usize = 1 << 20;

#[test]
fn pages_that_the_system_does_not_take_back_are_used_by_nobody_and_tried_again() {
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    if most.trim().parse().is_ok_and(|most: usize| most >= MOST_MAPPINGS) {
        println!("skipped: the system allows too many mappings");
        return;
    }
    let output = run("mappings", Refused { call: -1, argument: None, error: libc::EPERM });
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("every remnant was retried"), "{output:?}");
}

/// Divides a range of addresses until the process has as many mappings as the system allows. Returns the range.
fn divide_addresses() -> (*mut libc::c_void, usize) {
    const PAGE: usize = 4096;
    let bytes = 2 * MOST_MAPPINGS * PAGE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new range, which this process only divides and unmaps.
    let map = |bytes, access| unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
    let start = map(bytes, libc::PROT_NONE);
    assert_ne!(start, libc::MAP_FAILED);
    // SAFETY: as above: every second page of the range.
    let divide = |page: usize| unsafe { libc::mprotect(start.add(page * PAGE), PAGE, libc::PROT_READ) == 0 };
    assert!((0..2 * MOST_MAPPINGS).step_by(2).any(|page| !divide(page)), "the system has no such limit");
    // A division takes two mappings. The last ones are of one page each, and of different access, so that they do not merge.
    let mut access = [libc::PROT_READ, libc::PROT_NONE].into_iter().cycle().take(16);
    assert!(access.any(|access| map(PAGE, access) == libc::MAP_FAILED));
    (start, bytes)
}

fn use_up_mappings() {
    const PIECE: usize = 2 << 20;
    let options = MockOptions::new().with_capabilities(|can| can.register_piece_bytes = PIECE);
    let gpu = MockGpu::open(options).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let host = || {
        let host = runtime.statistics().host;
        assert_eq!(host.broken_law(), None, "{host:?}");
        host
    };
    let mut pinned = runtime.pinned::<u8>(3 * PIECE).unwrap();
    let at = pinned.ptr();
    pinned.write().unwrap().fill(1);
    drop(pinned);
    let (start, bytes) = divide_addresses();
    assert_eq!(runtime.trim().unwrap_err().kind(), ErrorKind::OperatingSystem);
    let statistics = host();
    assert_eq!((statistics.pieces, statistics.held_bytes, statistics.frees), (0, 0, 3));
    assert!(statistics.remnant_blocks > 0, "{statistics:?}");
    assert_eq!(statistics.remnant_bytes, statistics.remnant_blocks * PIECE as u64);
    assert_eq!(
        (gpu.live_objects().host_allocations, runtime.statistics().failed_releases),
        (0, statistics.remnant_blocks)
    );
    assert!(runtime.pinned_block_of(at).is_none());
    // SAFETY: the range of above.
    assert_eq!(unsafe { libc::munmap(start, bytes) }, 0);
    let mut other = runtime.pinned::<u8>(3 * PIECE).unwrap();
    assert_ne!(other.ptr(), at, "the remnants are mapped still");
    assert_eq!(host().remnant_blocks, statistics.remnant_blocks);
    other.write().unwrap().fill(2);
    runtime.trim().unwrap();
    assert_eq!((host().remnant_blocks, host().held_bytes), (0, 3 * PIECE as u64));
    assert!(other.read().unwrap().iter().all(|value| *value == 2));
    drop(other);
    assert_eq!(runtime.close().unwrap().total(), 0);
    println!("every remnant was retried");
}

// -------------------------------------------------------------------- no files, no sockets

/// The error of a call that the sandbox refuses says so, and gives no advice on anything else.
#[track_caller]
fn assert_blames_the_sandbox<T: std::fmt::Debug>(operation: &str, result: highwater_core::Result<T>) {
    let error = result.unwrap_err();
    assert_eq!(error.operation(), operation, "{error}");
    assert_eq!(error.code(), Some(i64::from(libc::EPERM)), "{error}");
    assert!(error.hint().contains("sandbox"), "{error}");
    println!("{error}");
}

#[test]
fn errors_of_refused_calls_blame_the_sandbox() {
    for role in ["files", "sockets"] {
        let output = run(role, Refused { call: -1, argument: None, error: libc::EPERM });
        assert!(output.status.success(), "{output:?}");
    }
}

fn make_files() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let buffer = runtime.device(0).unwrap().allocate_shared::<u32>(100).unwrap();
    refuse(&Refused { call: libc::SYS_memfd_create, argument: None, error: libc::EPERM }).unwrap();
    assert_blames_the_sandbox("open", MockGpu::open(MockOptions::new()));
    assert_blames_the_sandbox("share", buffer.share());
    let options = EventOptions::new().with_interprocess();
    assert_blames_the_sandbox("create_event", runtime.backend().create_event(0, &options));
}

fn make_sockets() {
    let (importer, exporter) = (MockGpu::open(MockOptions::new()).unwrap(), MockGpu::open(MockOptions::new()).unwrap());
    let (importer, exporter) = (Runtime::new(importer).unwrap(), Runtime::new(exporter).unwrap());
    let (shared, other) = (exporter.device(0).unwrap(), importer.device(0).unwrap());
    let (shared, other) = (shared.allocate_shared::<u32>(100).unwrap(), other.allocate_shared::<u32>(100).unwrap());
    let ticket = shared.share().unwrap();
    refuse(&Refused { call: libc::SYS_socket, argument: None, error: libc::EPERM }).unwrap();
    assert_blames_the_sandbox("open_shared", importer.open_shared::<u32>(&ticket));
    assert_blames_the_sandbox("share", other.share());
}
