//! The time of calls from C and of the same calls from Rust, on the mock: `cargo build --release -p highwater-c && cargo bench -p highwater-c`.
//!
//! The library is loaded as a C program loads it, and has a runtime of its own. The rounds of both languages alternate in one thread. Each row has
//! the median of the rounds and the fastest round.

use std::ffi::{CStr, c_char, c_void};
use std::hint::black_box;
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::time::Instant;

use front::{Fallback, OpenOptions, Result, Runtime};
use libloading::{Library, Symbol};

const ROUNDS: usize = 101;
const CALLS: u32 = 20_000;
const BYTES: usize = 4096;

type Handle = *mut c_void;
type Callback = unsafe extern "C" fn(*mut c_void, u64, u64, usize);
type Lend = unsafe extern "C" fn(Handle, Callback, *mut c_void) -> i32;
type Make = unsafe extern "C" fn(Handle, usize, *mut Handle) -> i32;
type Release = unsafe extern "C" fn(*mut Handle) -> i32;

unsafe extern "C" fn uses(_user: *mut c_void, handle: u64, _workspace: u64, _bytes: usize) {
    black_box(handle);
}

/// The library, and the handles of one runtime.
struct C {
    library: Library,
    runtime: Handle,
    stream: Handle,
}

impl C {
    fn open() -> Self {
        let exe = std::env::current_exe().expect("a program has a path");
        let near = exe.ancestors().skip(1).take(2).map(|folder| folder.join("libhighwater.so"));
        let path: PathBuf = near
            .filter(|path| path.exists())
            .last()
            .expect("build the library first: `cargo build --release -p highwater-c`");
        // SAFETY: The library is that of this package, and its initializers only set up Rust's standard library.
        let library = unsafe { Library::new(&path) }.expect("the library opens");
        let mut c = Self { library, runtime: null_mut(), stream: null_mut() };
        let mut device: Handle = null_mut();
        type Open = unsafe extern "C" fn(*const c_char, *const c_void, *mut Handle, *mut *mut c_char) -> i32;
        type Get = unsafe extern "C" fn(Handle, u32, *mut Handle) -> i32;
        type Create = unsafe extern "C" fn(Handle, *mut Handle) -> i32;
        let [mut runtime, mut stream] = [null_mut(); 2];
        // SAFETY: The functions have the types that the header declares, and get what it asks for.
        unsafe {
            c.check(c.symbol::<Open>("highwater_open")(c"mock".as_ptr(), null(), &mut runtime, null_mut()));
            c.check(c.symbol::<Get>("highwater_device_get")(runtime, 0, &mut device));
            c.check(c.symbol::<Create>("highwater_stream_create")(device, &mut stream));
        }
        (c.runtime, c.stream) = (runtime, stream);
        c
    }

    /// # Safety
    /// The caller must name a function of the header, and its type.
    unsafe fn symbol<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: As the caller promises.
        unsafe { self.library.get(name) }.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    #[inline]
    fn check(&self, status: i32) {
        if status != 0 {
            // SAFETY: The function takes nothing and returns a text of this thread.
            let text = unsafe {
                CStr::from_ptr(self.symbol::<unsafe extern "C" fn() -> *const c_char>("highwater_last_error")())
            };
            panic!("{}", text.to_string_lossy());
        }
    }
}

/// A call, and its name.
type Row<'a> = (&'static str, Box<dyn FnMut() -> Result<()> + 'a>);

fn round(call: &mut dyn FnMut() -> Result<()>) -> f64 {
    let start = Instant::now();
    for _ in 0..CALLS {
        call().expect("the mock refuses nothing");
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}

fn main() -> Result<()> {
    let runtime = Runtime::with_options(
        OpenOptions::new().with_name("mock").with_fallback(Fallback::None).open()?.backend,
        &Default::default(),
    )?;
    let stream = runtime.device(0)?.create_stream()?;
    let c = C::open();
    // SAFETY: The names and types are those of the header.
    let (enqueue, lend, allocate, release) = unsafe {
        (
            *c.symbol::<Lend>("highwater_blas_enqueue"),
            *c.symbol::<Lend>("highwater_blas_lend"),
            *c.symbol::<Make>("highwater_pinned_allocate"),
            *c.symbol::<Release>("highwater_pinned_release"),
        )
    };
    let mut rows: Vec<Row<'_>> = vec![
        ("Rust: lease and return", Box::new(|| stream.blas().map(|lease| drop(black_box(lease))))),
        (
            "Rust: lease, enqueue, return",
            Box::new(|| {
                // SAFETY: The closure only reads the number.
                unsafe { stream.blas()?.enqueue_raw(black_box) }.map(|_| ())
            }),
        ),
        (
            "C: highwater_blas_enqueue",
            Box::new(|| {
                // SAFETY: The stream is live, and the callback only reads the number.
                c.check(unsafe { enqueue(c.stream, uses, null_mut()) });
                Ok(())
            }),
        ),
        ("Rust: lease, lend, return", Box::new(|| stream.blas()?.with_raw(|raw| black_box(raw.handle)).map(|_| ()))),
        (
            "C: highwater_blas_lend",
            Box::new(|| {
                // SAFETY: As above.
                c.check(unsafe { lend(c.stream, uses, null_mut()) });
                Ok(())
            }),
        ),
        ("Rust: pinned hit, 4 KiB", Box::new(|| runtime.pinned::<u8>(BYTES).map(|block| drop(black_box(block))))),
        (
            "C: highwater_pinned_allocate, _release",
            Box::new(|| {
                let mut pinned = null_mut();
                // SAFETY: The runtime is live, and the place is a variable.
                c.check(unsafe { allocate(c.runtime, BYTES, &mut pinned) });
                // SAFETY: The handle was made above, and has no other copy.
                c.check(unsafe { release(black_box(&mut pinned)) });
                Ok(())
            }),
        ),
    ];
    let mut times = vec![Vec::with_capacity(ROUNDS); rows.len()];
    for _ in 0..ROUNDS {
        for ((_, call), times) in rows.iter_mut().zip(&mut times) {
            times.push(round(call));
        }
    }
    println!("{:40} {:>12} {:>12}", "nanoseconds of a call", "median", "fastest");
    for ((name, _), times) in rows.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        println!("{name:40} {:12.1} {:12.1}", times[ROUNDS / 2], times[0]);
    }
    Ok(())
}
