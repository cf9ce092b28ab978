//! Processes in which the system refuses calls that it usually allows.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output};

use highwater_core::{ErrorKind, EventOptions, Runtime};
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
