//! Plugins that are wrong in one way each, built from one C source: the program survives every one, and says which plugin and
//! which slot is to blame. And the layout of the table, held by a C compiler too.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, LazyLock};
use std::time::{Duration, Instant};

use highwater_core::{
    AllocateOptions, Backend, BlasKind, BlasOptions, CopyShape, DevicePtr, ErrorKind, EventOptions, HostOptions,
    Location, MemoryCopy2d, Runtime, StreamOptions, Transport,
};
use highwater_plugin::{LoadOptions, Plugin, Refusal, Stage, load};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plugin");
const HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include/highwater.h");
/// The header of the first version, which plugins are built against for ever.
const FIRST_HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plugin/highwater-1.h");

fn compile(arguments: &[&str], output: &Path) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let built = Command::new(&compiler)
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror"])
        .args(arguments)
        .arg("-o")
        .arg(output)
        .output()
        .unwrap_or_else(|error| panic!("these tests need a C compiler: `{compiler}` does not start: {error}"));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// A file of this run of the tests.
fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()))
}

/// The bytes of the plugin, built against a header.
fn compile_plugin(header: &str, more: &str) -> Vec<u8> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let output = Built(scratch(&format!("plugin-{}.so", NEXT.fetch_add(1, Ordering::Relaxed))));
    let (header, source) = (format!("-DHEADER=\"{header}\""), format!("{FOLDER}/plugin.c"));
    let mut arguments = vec!["-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-z,nodelete", &header];
    arguments.extend(["-Wno-unused-function", "-Wno-unused-variable", "-Wno-unused-const-variable", more, &source]);
    arguments.retain(|argument| !argument.is_empty());
    compile(&arguments, &output.0);
    std::fs::read(&output.0).unwrap()
}

/// The number of a way to be wrong, which is its place in the list of the source.
fn number_of(wrong: &str) -> u32 {
    let source = std::fs::read_to_string(format!("{FOLDER}/plugin.c")).unwrap();
    let list = source.split_once("enum {").unwrap().1.split_once("};").unwrap().0;
    let without_comments = list.split("*/").map(|part| part.split("/*").next().unwrap()).collect::<String>();
    let place = without_comments.split(',').position(|name| name.trim() == wrong);
    u32::try_from(place.unwrap_or_else(|| panic!("there is no way to be wrong called {wrong}"))).unwrap()
}

/// A copy of the plugin that is wrong in this way, in a file of its own.
fn copy_of(plugin: &[u8], wrong: &str, name: &str) -> Built {
    const MARK: &[u8] = b"WRONG-->";
    let mut bytes = plugin.to_vec();
    let place = bytes.windows(MARK.len()).position(|window| window == MARK).unwrap() + MARK.len();
    bytes[place..place + 4].copy_from_slice(&number_of(wrong).to_ne_bytes());
    let file = Built(scratch(&format!("{name}.so")));
    std::fs::write(&file.0, bytes).unwrap();
    file
}

fn build(wrong: &str, name: &str) -> Built {
    static PLUGIN: LazyLock<Vec<u8>> = LazyLock::new(|| compile_plugin(HEADER, ""));
    copy_of(&PLUGIN, wrong, name)
}

/// A file for one test, which is gone when it is dropped.
struct Built(PathBuf);

impl Drop for Built {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn loaded(wrong: &str) -> Result<Arc<Plugin>, Refusal> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let built = build(wrong, &format!("{}-{}", wrong.to_lowercase(), NEXT.fetch_add(1, Ordering::Relaxed)));
    load(&built.0, &LoadOptions::new().with_limit(Duration::from_millis(400)))
}

#[track_caller]
fn refused(wrong: &str) -> Refusal {
    match loaded(wrong) {
        Err(refusal) => refusal,
        Ok(plugin) => panic!("{wrong} was loaded: {plugin:?}"),
    }
}

/// The backend of a plugin that loads and opens.
fn opened(wrong: &str) -> Arc<dyn Backend> {
    loaded(wrong).unwrap().open().unwrap()
}

// ----------------------------------------------------------------------------------------------------------- well-formed

#[test]
fn a_plugin_built_against_either_header_says_who_it_is_and_works() {
    for built in [build("NOTHING", "good"), copy_of(&compile_plugin(FIRST_HEADER, ""), "NOTHING", "good-first")] {
        let plugin = load(&built.0, &LoadOptions::new()).unwrap();
        assert_eq!((plugin.name(), plugin.version(), plugin.vendor()), ("test", "1.0", "Highwater"));
        assert_eq!((plugin.description(), plugin.table_version()), ("A device for tests", 1));
        assert_eq!(plugin.file(), built.0.canonicalize().unwrap());
        assert_eq!(plugin.groups(), ["required", "host", "blas", "capture", "ipc"]);
        let again = load(&built.0, &LoadOptions::new()).unwrap();
        assert!(Arc::ptr_eq(&plugin, &again), "a file is loaded once");
        let backend = plugin.open().unwrap();
        assert!(plugin.warnings().is_empty(), "{:?}", plugin.warnings());
        let identity = backend.identity();
        assert_eq!((identity.name.as_str(), identity.real_device), ("test", false));
        assert_eq!(identity.versions, [("test".to_owned(), "1".to_owned()), ("other".to_owned(), "2".to_owned())]);
        assert_eq!(identity.blas_workspace_variables, ["TEST_WORKSPACE_CONFIG"]);
        let capabilities = backend.capabilities(0).unwrap();
        assert!(capabilities.gemm_f32 && capabilities.capture && !capabilities.gemm_f64 && !capabilities.lt_plans);
        assert!(capabilities.ipc_transports.contains(Transport::Descriptor) && backend.ipc_sharing().is_some());
        assert_eq!(backend.capabilities(1).unwrap_err().kind(), ErrorKind::InvalidArgument);
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        assert_eq!(stream.tag(), identity.tag);
        // Without a slot for it, a copy of rows is a copy of each row. The plugin refuses that of the third.
        let at = |address| Location::Device { device: 0, ptr: DevicePtr::new(address) };
        for (height, refused) in [(2, None), (3, Some(ErrorKind::InvalidPointer))] {
            let shape = CopyShape::new(16, height).with_dst_pitch(32);
            // SAFETY: nothing lies behind the addresses of this backend.
            let copied = unsafe { backend.copy_2d(&MemoryCopy2d::new(at(0x1000), at(0x2000), shape), stream) };
            assert_eq!(copied.err().map(|error| error.kind()), refused);
        }
        backend.destroy_stream(stream).unwrap();
        let second = plugin.open().unwrap();
        assert_ne!(second.identity().tag, identity.tag, "every backend has a tag of its own");
        let error = backend.event_elapsed_ns(
            backend.create_event(0, &EventOptions::new()).unwrap(),
            backend.create_event(0, &EventOptions::new()).unwrap(),
        );
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("`test`") && error.message().contains("event_elapsed_ns"), "{error}");
    }
}

#[test]
fn an_entry_point_within_the_limit_is_waited_for() {
    assert_eq!(loaded("ENTRY_SLOW").unwrap().name(), "test");
}

#[test]
fn taking_a_pooled_handle_again_does_not_cross_the_table() {
    let built = build("NOTHING", "counting");
    let plugin = load(&built.0, &LoadOptions::new()).unwrap();
    // SAFETY: the library is loaded already, and never unloaded.
    let library = unsafe { libloading::Library::new(&built.0) }.unwrap();
    let count = || {
        // SAFETY: the symbol is a counter, which the plugin changes by atomics only.
        let counter = unsafe { &**library.get::<*const AtomicU64>(b"hw_test_calls").unwrap() };
        counter.load(Ordering::Relaxed)
    };
    let calls = count();
    let runtime = Runtime::new(plugin.open().unwrap()).unwrap();
    assert!(count() > calls, "opening crosses the table");
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    drop(stream.blas().unwrap());
    let before = count();
    for _ in 0..100 {
        drop(stream.blas().unwrap());
    }
    assert_eq!(count(), before);
}

#[test]
fn a_handle_of_a_plugin_that_cannot_reset_it_is_replaced_after_it_was_lent() {
    let backend = opened("NOTHING");
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    assert_eq!(handle.reset().unwrap_err().kind(), ErrorKind::Unsupported);
    drop(handle);
    let runtime = Runtime::new(Arc::clone(&backend)).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let mut lease = stream.blas().unwrap();
    lease.with_raw(|_| ()).unwrap();
    lease.with_raw(|_| ()).unwrap();
}

#[test]
fn a_forked_child_opens_nothing_of_its_parents_plugins() {
    let plugin = loaded("NOTHING").unwrap();
    // SAFETY: the child makes one call, which looks at a page and makes an error, and ends with `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let refused = plugin.open().is_err_and(|refusal| refusal.error.kind() == ErrorKind::Forked);
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert!(plugin.open().is_ok());
}

// ------------------------------------------------------------------------------------------------------------- malformed

#[test]
fn files_that_are_no_libraries_are_refused() {
    let good = std::fs::read(&build("NOTHING", "whole").0).unwrap();
    let mut other = good.clone();
    other[18] ^= 0xff;
    let mut executable = good.clone();
    executable[16] = 2;
    let files: [(&str, &[u8], Stage); 6] = [
        ("text", b"no library, but a text that is longer than twenty bytes", Stage::Platform),
        ("empty", b"", Stage::Platform),
        ("header-only", &good[..64], Stage::Platform),
        ("cut", &good[..good.len() / 2], Stage::Platform),
        ("other-machine", &other, Stage::Platform),
        ("executable", &executable, Stage::Platform),
    ];
    for (name, bytes, stage) in files {
        let file = Built(scratch(&format!("{name}.so")));
        std::fs::write(&file.0, bytes).unwrap();
        let refusal = load(&file.0, &LoadOptions::new()).unwrap_err();
        assert_eq!(refusal.stage, stage, "{name}: {refusal}");
        assert!(refusal.to_string().contains(name), "{refusal}");
    }
}

#[test]
fn libraries_that_are_no_plugins_are_refused() {
    let unresolved = copy_of(&compile_plugin(HEADER, "-DWRONG_UNRESOLVED"), "NOTHING", "unresolved");
    let refusal = load(&unresolved.0, &LoadOptions::new()).unwrap_err();
    assert_eq!((refusal.stage, refusal.error.kind()), (Stage::Symbol, ErrorKind::SymbolMissing));
    assert!(refusal.to_string().contains("hw_test_no_such_function"), "the loader's own words: {refusal}");
    let without = copy_of(&compile_plugin(HEADER, "-DWRONG_NO_ENTRY"), "NOTHING", "no-entry");
    let refusal = load(&without.0, &LoadOptions::new()).unwrap_err();
    assert_eq!(refusal.stage, Stage::EntryPoint);
    assert!(refusal.to_string().contains("highwater_plugin"), "{refusal}");
}

/// Loaded, each would end the process.
#[test]
fn an_entry_point_that_is_no_function_is_not_called() {
    for (name, code) in [
        ("entry-data", "int highwater_plugin = 5;"),
        ("entry-constant", "const long highwater_plugin[9] = {5};"),
        ("entry-thread-local", "__thread int highwater_plugin = 5;"),
        ("entry-number", "__asm__(\".globl highwater_plugin\\n.set highwater_plugin, 5\");"),
    ] {
        let library = compile_library(code, name);
        let refusal = load(&library.0, &LoadOptions::new()).unwrap_err();
        assert_eq!((refusal.stage, refusal.error.kind()), (Stage::EntryPoint, ErrorKind::SymbolMissing), "{refusal}");
        assert!(refusal.to_string().contains("`highwater_plugin` is data and no function"), "{refusal}");
    }
}

#[test]
fn what_a_plugin_says_of_itself_is_checked_when_it_is_loaded() {
    let expected: &[(&str, Stage, &str)] = &[
        ("ENTRY_NULL", Stage::EntryPoint, "refused this program"),
        ("ENTRY_HANGS", Stage::EntryPoint, "did not come back within 400ms"),
        ("PLUGIN_SIZE_ZERO", Stage::EntryPoint, "says it has 0 bytes"),
        ("PLUGIN_SIZE_HUGE", Stage::EntryPoint, "says it has 18446744073709551615 bytes"),
        ("PLUGIN_SIZE_SMALL", Stage::EntryPoint, "says it has 48 bytes"),
        ("PLUGIN_SURPLUS", Stage::EntryPoint, "uses byte 64"),
        ("PLUGIN_MISALIGNED", Stage::EntryPoint, "not aligned"),
        ("NAME_NULL", Stage::Table, "its name is null"),
        ("NAME_EMPTY", Stage::Table, "its name is \"\""),
        ("NAME_ODD", Stage::Table, "\"../test\""),
        ("NAME_ENDLESS", Stage::Table, "without a NUL"),
        ("DESCRIPTION_NO_UTF8", Stage::Table, "its description is a text that is not UTF-8"),
        ("VENDOR_NULL", Stage::Table, "its vendor is null"),
        ("VERSIONS_CROSSED", Stage::Version, "versions 2 to 1"),
        ("VERSIONS_ABOVE", Stage::Version, "versions 2 to 9 of the table, and this program 1 to 1"),
        ("VERSIONS_ZERO", Stage::Version, "versions 0 to 0"),
        ("OPEN_NULL", Stage::Table, "`open` is null"),
        ("TABLE_CALL_NULL", Stage::Table, "`table` is null"),
        ("TABLE_NULL", Stage::Table, "is null or not aligned"),
        ("TABLE_MISALIGNED", Stage::Table, "is null or not aligned"),
        ("TABLE_SIZE_ZERO", Stage::Table, "says it has 0 bytes"),
        ("TABLE_SIZE_SMALL", Stage::Table, "or more, in multiples of 8"),
        ("TABLE_SIZE_HUGE", Stage::Table, "says it has 18446744073709551615 bytes"),
        ("TABLE_SIZE_ODD", Stage::Table, "in multiples of 8"),
        ("TABLE_EMPTY", Stage::Table, "none of the required slots"),
        ("SLOT_REQUIRED_NULL", Stage::Table, "lacks the slot `query_event`"),
        ("SLOT_CAPTURE_NULL", Stage::Table, "lacks the slot `end_capture`, and has others of the group `capture`"),
        ("SLOT_BLAS_NULL", Stage::Table, "lacks the slot `handle_close`"),
        ("SLOT_HOST_NULL", Stage::Table, "lacks the slot `host_free`"),
    ];
    for (wrong, stage, words) in expected {
        let refusal = refused(wrong);
        assert_eq!(refusal.stage, *stage, "{wrong}: {refusal}");
        let text = refusal.to_string();
        assert!(text.contains(words), "{wrong}: {text}");
        assert!(text.contains(&wrong.to_lowercase()), "{wrong}: the file is named: {text}");
        assert!(!refusal.error.hint().is_empty(), "{wrong}: {text}");
        if let Some(slot) = wrong.strip_prefix("SLOT_") {
            assert!(refusal.slot.is_some(), "{slot}: {text}");
        }
    }
}

#[test]
fn an_entry_point_that_hangs_is_not_called_again() {
    let built = build("ENTRY_HANGS", "hangs-twice");
    let limit = LoadOptions::new().with_limit(Duration::from_millis(200));
    assert_eq!(load(&built.0, &limit).unwrap_err().stage, Stage::EntryPoint);
    let started = std::time::Instant::now();
    let again = load(&built.0, &LoadOptions::new()).unwrap_err();
    assert!(again.to_string().contains("did not come back") && started.elapsed() < Duration::from_secs(5), "{again}");
}

/// Compiles a small library of its own.
fn compile_library(code: &str, name: &str) -> Built {
    let source = Built(scratch(&format!("{name}.c")));
    std::fs::write(&source.0, code).unwrap();
    let library = Built(scratch(&format!("{name}.so")));
    compile(&["-shared", "-fPIC", "-O1", source.0.to_str().unwrap()], &library.0);
    library
}

const LIBRARIES: &str = "HIGHWATER_TEST_LIBRARIES";

/// Runs one test of this file in a process of its own, with these libraries.
///
/// A late constructor blocks every load of its process, so it must not run beside other tests.
fn start_alone(test: &str, libraries: &[&Built]) -> Alone {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let libraries = std::env::join_paths(libraries.iter().map(|library| &library.0)).unwrap();
    child.args(["--exact", test, "--nocapture", "--ignored"]).env(LIBRARIES, libraries);
    Alone(child.stdin(Stdio::null()).spawn().unwrap())
}

/// A process that the drop kills.
struct Alone(Child);

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

#[track_caller]
fn wait_for(mut alone: Alone) -> ExitStatus {
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline {
        if let Some(status) = alone.0.try_wait().unwrap() {
            return status;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("the process hangs");
}

fn given_libraries() -> Vec<PathBuf> {
    std::env::split_paths(&std::env::var_os(LIBRARIES).unwrap_or_default()).collect()
}

/// Ends with `abort`, because the process cannot exit.
#[test]
#[ignore = "another test runs it in a process of its own"]
fn child_loads_libraries_whose_constructors_hang() {
    let libraries = given_libraries();
    let limit = LoadOptions::new().with_limit(Duration::from_millis(300));
    // Several threads at once, none of which has loaded anything before. All have started before the loader is blocked.
    let started = Arc::new(Barrier::new(libraries.len()));
    let loading = |library: &PathBuf| {
        let (library, started) = (library.clone(), Arc::clone(&started));
        std::thread::spawn(move || {
            started.wait();
            load(&library, &limit).unwrap_err()
        })
    };
    let threads: Vec<_> = libraries.iter().map(loading).collect();
    let refusals: Vec<Refusal> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let late = refusals.iter().filter(|it| it.stage == Stage::EntryPoint).count();
    let blocked = refusals.iter().filter(|it| it.error.kind() == ErrorKind::InvalidState).count();
    let again: Vec<Refusal> = libraries.iter().map(|it| load(it, &LoadOptions::new()).unwrap_err()).collect();
    if (late, blocked, again.len()) == (1, 2, 3) && highwater_plugin::blocked().is_some() {
        std::process::abort();
    }
    eprintln!("{refusals:?} {again:?}");
}

#[test]
fn a_constructor_that_hangs_holds_no_load_up_for_longer_than_its_limit() {
    let code = "#include <unistd.h>\n__attribute__((constructor)) static void c(void) { for (;;) pause(); }";
    let libraries: Vec<Built> = (0..3).map(|number| compile_library(code, &format!("hangs-{number}"))).collect();
    let libraries: Vec<&Built> = libraries.iter().collect();
    let start = || start_alone("child_loads_libraries_whose_constructors_hang", &libraries);
    // Several, because the failure depends on which thread is first.
    for child in (0..6).map(|_| start()).collect::<Vec<_>>() {
        assert_eq!(wait_for(child).signal(), Some(libc::SIGABRT));
    }
}

#[test]
#[ignore = "another test runs it in a process of its own"]
fn child_loads_a_library_with_a_slow_constructor() {
    let [slow, good] = &given_libraries()[..] else { panic!() };
    let late = load(slow, &LoadOptions::new().with_limit(Duration::from_millis(100))).unwrap_err();
    assert!(late.to_string().contains("constructors did not come back within 100ms"), "{late}");
    let blocked = highwater_plugin::blocked().unwrap();
    assert!(blocked.message().contains("slow-constructor"), "{blocked}");
    while highwater_plugin::blocked().is_some() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(load(good, &LoadOptions::new()).unwrap().name(), "test");
}

#[test]
fn a_slow_constructor_blocks_other_loads_only_until_it_returns() {
    let slow = "#include <unistd.h>\n__attribute__((constructor)) static void c(void) { sleep(2); }";
    let (slow, good) = (compile_library(slow, "slow-constructor"), build("NOTHING", "beside-slow"));
    let status = wait_for(start_alone("child_loads_a_library_with_a_slow_constructor", &[&slow, &good]));
    assert!(status.success(), "{status}");
}

#[test]
fn what_a_backend_says_of_itself_is_checked_when_it_is_opened() {
    let expected: &[(&str, ErrorKind, &str)] = &[
        ("OPEN_UNKNOWN_CODE", ErrorKind::Vendor, "answered 4711 in `open`, which is no code: words"),
        ("OPEN_NO_BACKEND", ErrorKind::Vendor, "answered in `open` with a null pointer"),
        ("OPEN_ENDLESS_TEXT", ErrorKind::LibraryMissing, "mmmm"),
        ("OPEN_NO_UTF8", ErrorKind::DeviceMissing, "\u{fffd}\u{fffd} words"),
        ("OPEN_PANICS", ErrorKind::InvalidState, "panicked in `open` and is not called any more: a panic's words"),
        ("NO_DEVICE", ErrorKind::DeviceMissing, "has no device"),
        ("TOO_MANY_DEVICES", ErrorKind::Vendor, "answered in `device_count` with 4294967295 devices"),
        ("IDENTITY_ENDLESS", ErrorKind::Vendor, "answered in `identity` with a text without a NUL in its 64 bytes"),
        ("IDENTITY_NAMELESS", ErrorKind::Vendor, "answered in `identity` with no name"),
        ("IDENTITY_FLAG", ErrorKind::Vendor, "answered in `identity` with 7 for `real_device`"),
        ("IDENTITY_VERSIONS", ErrorKind::Vendor, "answered in `identity` with the version `test 1` without a tab"),
        ("IDENTITY_TOO_LARGE", ErrorKind::Vendor, "answered in `identity` with a `hw_identity` of 1048576 bytes"),
        ("CAPABILITIES_ALIGNMENT", ErrorKind::Vendor, "answered in `capabilities` with a `workspace_alignment` of 3"),
        ("ORDINAL_OTHER", ErrorKind::Vendor, "answered in `device_info` with the ordinal 5 for device 0"),
    ];
    for (wrong, kind, words) in expected {
        let refusal = loaded(wrong).unwrap().open().unwrap_err();
        assert_eq!((refusal.stage, refusal.error.kind()), (Stage::Open, *kind), "{wrong}: {refusal}");
        let text = refusal.to_string();
        assert!(text.contains(words), "{wrong}: {text}");
        let own_words = ["OPEN_ENDLESS_TEXT", "OPEN_NO_UTF8"].contains(wrong);
        assert!(own_words || text.contains("the plugin `test`"), "{wrong}: {text}");
    }
    let plugin = loaded("OPEN_PANICS").unwrap();
    let first = plugin.open().unwrap_err().to_string();
    assert_eq!(plugin.open().unwrap_err().to_string(), first, "a plugin that panicked is not called again");
}

#[test]
fn abilities_without_slots_are_taken_away_and_named() {
    let plugin = loaded("CAPABILITIES_LIE").unwrap();
    let backend = plugin.open().unwrap();
    let capabilities = backend.capabilities(0).unwrap();
    assert!(capabilities.capture && !capabilities.lt_plans && !capabilities.event_timing);
    let warnings = plugin.warnings().join("\n");
    assert!(warnings.contains("lt_plans, event_timing"), "{warnings}");
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Lt)).unwrap();
    let error = handle.destroy_plan(highwater_core::PlanId::new(1)).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("`destroy_plan`"), "{error}");
}

#[test]
fn answers_that_cannot_be_are_errors_that_name_plugin_and_slot() {
    type Call = fn(&dyn Backend) -> highwater_core::Result<()>;
    let stream: Call = |backend| backend.create_stream(0, &StreamOptions::new()).map(drop);
    let with_stream = |call: fn(&dyn Backend, highwater_core::StreamId) -> highwater_core::Result<()>| {
        move |backend: &dyn Backend| call(backend, backend.create_stream(0, &StreamOptions::new())?)
    };
    let query = with_stream(|backend, stream| backend.query_stream(stream).map(drop));
    let wait = with_stream(|backend, stream| backend.synchronize_stream(stream));
    let asked = with_stream(|backend, stream| backend.is_capturing(stream).map(drop));
    let export = |backend: &dyn Backend| {
        let ptr = backend.allocate(0, &AllocateOptions::new(256))?;
        // SAFETY: nothing lies behind the addresses of this backend.
        unsafe { backend.ipc_sharing().unwrap().export_memory(0, ptr, Transport::Descriptor) }.map(drop)
    };
    let host = |backend: &dyn Backend| backend.host_allocator().allocate(64, &HostOptions::new()).map(drop);
    type Boxed = Box<dyn Fn(&dyn Backend) -> highwater_core::Result<()>>;
    let expected: Vec<(&str, &str, &str, Boxed)> = vec![
        ("ID_GENERATION_ZERO", "create_stream", "generation or tag of 0", Box::new(stream)),
        ("ID_TAG_OTHER", "create_stream", "expected are tag", Box::new(stream)),
        ("ID_DEVICE_OTHER", "create_stream", "a device below 1", Box::new(stream)),
        ("ID_NAMED", "create_stream", "a slot below", Box::new(stream)),
        (
            "EVENT_UNWRITTEN",
            "create_event",
            "generation or tag of 0",
            Box::new(|backend| backend.create_event(0, &EventOptions::new()).map(drop)),
        ),
        ("COMPLETION_UNKNOWN", "query_stream", "7 for an answer", Box::new(query)),
        ("CODE_UNKNOWN", "synchronize_stream", "4711", Box::new(wait)),
        ("CODE_NEGATIVE", "synchronize_stream", "-5", Box::new(wait)),
        ("FLAG_UNKNOWN", "device_info", "2 for `has_numa_node`", Box::new(|backend| backend.device_info(0).map(drop))),
        ("FLAG_UNKNOWN", "is_capturing", "2 for yes or no", Box::new(asked)),
        (
            "ADDRESS_ZERO",
            "allocate",
            "address 0",
            Box::new(|backend| backend.allocate(0, &AllocateOptions::new(256)).map(drop)),
        ),
        ("HOST_NULL", "host_allocate", "a null pointer", Box::new(host)),
        ("HOST_MISALIGNED", "host_allocate", "no multiple of 64", Box::new(host)),
        (
            "HANDLE_NULL",
            "create_handle",
            "a null pointer",
            Box::new(|backend| backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).map(drop)),
        ),
        ("DESCRIPTOR_BAD", "export_memory", "-7 for a descriptor", Box::new(export)),
        ("DESCRIPTOR_CLOSED", "export_memory", "9999 for a descriptor, which is not open", Box::new(export)),
        ("TRANSPORT_UNKNOWN", "export_memory", "31 for a way in which memory is shared", Box::new(export)),
    ];
    let mut plugins = BTreeMap::new();
    for (wrong, slot, words, call) in expected {
        // A plugin that answers so at once does not open; what is asked for later does.
        let plugin = plugins.entry(wrong).or_insert_with(|| loaded(wrong).unwrap());
        let error = match plugin.open() {
            Ok(backend) => call(&*backend).unwrap_err(),
            Err(refusal) => refusal.error,
        };
        let text = error.to_string();
        if wrong == "FLAG_UNKNOWN" && slot == "is_capturing" {
            // The device's answer comes first.
            assert!(text.contains("`device_info`"), "{text}");
            continue;
        }
        assert_eq!(error.kind(), ErrorKind::Vendor, "{wrong}: {text}");
        assert!(text.contains("the plugin `test`") && text.contains(&format!("`{slot}`")), "{wrong}: {text}");
        assert!(text.contains(words), "{wrong}: {text}");
    }
}

#[test]
fn a_plugin_that_panicked_is_not_called_again() {
    let plugin = loaded("CALL_PANICS").unwrap();
    let backend = plugin.open().unwrap();
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    let error = backend.synchronize_stream(stream).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidState);
    assert!(error.message().contains("`test` panicked in `synchronize_stream`"), "{error}");
    assert!(error.message().contains("a panic's words"), "{error}");
    for error in [
        backend.query_stream(stream).unwrap_err(),
        handle.set_stream(stream).unwrap_err(),
        backend.host_allocator().allocate(64, &HostOptions::new()).unwrap_err(),
        plugin.open().unwrap_err().error,
    ] {
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        assert!(error.message().contains("is not called any more"), "{error}");
    }
    assert_eq!(backend.live_objects().total(), 0);
}

#[test]
fn words_without_an_end_are_cut_and_failing_destructors_do_no_harm() {
    let backend = opened("ERROR_SIZE_GARBAGE");
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    let error = backend.synchronize_stream(stream).unwrap_err();
    assert_eq!((error.kind(), error.code()), (ErrorKind::DeviceLost, None));
    assert_eq!(error.message(), "m".repeat(512));
    drop(opened("CLOSE_FAILS"));
    let backend = opened("HANDLE_CLOSE_FAILS");
    drop(backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap());
    assert!(backend.query_stream(backend.create_stream(0, &StreamOptions::new()).unwrap()).unwrap().is_complete());
}

// ------------------------------------------------------------------------------------------------- made with our exporter

/// Builds the plugin of `tests/plugin/panicking`. Each copy of it is a plugin of its own.
fn panicking(name: &str) -> Built {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--locked", "-p", "highwater-panicking-plugin", "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap_or_else(|error| panic!("this test builds a plugin: `{}` does not start: {error}", env!("CARGO")));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let copy = Built(target.join(format!("tmp/panicking-{name}-{}.so", std::process::id())));
    std::fs::copy(target.join("debug/libhwtest_panicking.so"), &copy.0).unwrap();
    copy
}

#[test]
fn panics_behind_our_exporter_are_errors_that_name_plugin_and_slot() {
    type Call = fn(&dyn Backend) -> highwater_core::Result<()>;
    let calls: [(&str, &str, &str, Call); 5] = [
        ("host", "host_allocate", "no 64 bytes today", |b| {
            b.host_allocator().allocate(64, &HostOptions::new()).map(drop)
        }),
        ("handle", "create_handle", "no handle today", |b| {
            b.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).map(drop)
        }),
        ("device", "synchronize_device", "device 0 is not waited for", |b| b.synchronize_device(0)),
        ("payload", "synchronize_stream", "without a text", |b| {
            b.synchronize_stream(b.create_stream(0, &StreamOptions::new())?)
        }),
        ("long", "memory_info", "xxxxxxxx", |b| b.memory_info(0).map(drop)),
    ];
    for (name, slot, words, call) in calls {
        let built = panicking(name);
        let backend = load(&built.0, &LoadOptions::new()).unwrap().open().unwrap();
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        assert!(backend.query_stream(stream).unwrap().is_complete());
        let error = call(&*backend).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        let text = error.message();
        assert!(text.contains("`panicking` panicked") && text.contains(&format!("`{slot}`")), "{error}");
        assert!(text.contains(words), "{error}");
        // Not called any more, not even to be closed.
        assert_eq!(backend.query_stream(stream).unwrap_err().kind(), ErrorKind::InvalidState);
    }
}

#[test]
fn ids_of_a_backend_behind_our_exporter_are_checked() {
    let built = panicking("ids");
    let plugin = load(&built.0, &LoadOptions::new()).unwrap();
    // The counter of tags in the plugin begins as this program's does, so the two meet.
    let backends: Vec<_> = (0..4).map(|_| plugin.open().unwrap()).collect();
    let streams: Vec<_> =
        backends.iter().map(|backend| backend.create_stream(0, &StreamOptions::new()).unwrap()).collect();
    for (owner, stream) in streams.iter().enumerate() {
        for (other, backend) in backends.iter().enumerate() {
            let outcome = backend.query_stream(*stream);
            if owner == other {
                assert!(outcome.unwrap().is_complete());
            } else {
                assert_eq!(outcome.unwrap_err().kind(), ErrorKind::InvalidHandle, "{stream:?} on backend {other}");
            }
        }
    }
    backends[0].destroy_stream(streams[0]).unwrap();
    assert_eq!(backends[0].destroy_stream(streams[0]).unwrap_err().kind(), ErrorKind::InvalidHandle);
    // Its destructor panics, which is caught.
    drop(backends);
    assert_eq!(plugin.open().unwrap_err().error.kind(), ErrorKind::InvalidState);
}

// ---------------------------------------------------------------------------------------------------------------- layout

#[test]
fn the_header_is_the_one_that_the_list_makes() {
    let header = std::fs::read_to_string(HEADER).unwrap();
    let again = "cargo run -q -p highwater-plugin --example header > plugin/include/highwater.h";
    assert!(
        header == highwater_plugin::header(),
        "plugin/include/highwater.h differs from the list; generate it by `{again}`"
    );
}

/// Every field of the first version: struct, field, offset, bytes.
fn first_layout() -> Vec<(String, String, usize, usize)> {
    let text = std::fs::read_to_string(format!("{FOLDER}/layout-1.txt")).unwrap();
    let field = |line: &str| {
        let mut words = line.split(' ').map(str::to_owned);
        let mut word = || words.next().unwrap();
        (word(), word(), word().parse().unwrap(), word().parse().unwrap())
    };
    text.lines().map(field).collect()
}

#[test]
fn every_field_of_the_first_version_lies_where_it_lay() {
    let layout = highwater_plugin::layout();
    for (name, field, offset, bytes) in first_layout() {
        if field == "-" {
            // Structs grow at their end.
            let whole = layout.lines().find_map(|line| line.strip_prefix(&format!("{name} - 0 "))).unwrap();
            assert!(whole.parse::<usize>().unwrap() >= bytes, "{name} has shrunk");
        } else {
            let line = format!("{name} {field} {offset} {bytes}");
            assert!(layout.lines().any(|other| other == line), "moved or gone: {line}");
        }
    }
}

#[test]
fn a_c_compiler_lays_both_headers_out_in_the_same_way() {
    for (header, name) in [(HEADER, "layout"), (FIRST_HEADER, "layout-first")] {
        let mut source = format!("#include <stddef.h>\n#include \"{header}\"\n");
        for (name, field, offset, bytes) in first_layout() {
            if field == "-" {
                let same = if header == FIRST_HEADER { "==" } else { ">=" };
                source += &format!("_Static_assert(sizeof({name}) {same} {bytes}, \"{name}\");\n");
            } else {
                source += &format!("_Static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");\n");
                source += &format!("_Static_assert(sizeof((({name} *)0)->{field}) == {bytes}, \"{name}.{field}\");\n");
            }
        }
        source += "int main(void) { return 0; }\n";
        let file = Built(scratch(&format!("{name}.c")));
        std::fs::write(&file.0, source).unwrap();
        let output = Built(scratch(name));
        compile(&["-pedantic-errors", file.0.to_str().unwrap()], &output.0);
    }
}
