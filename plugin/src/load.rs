//! Loading of plugins: checks of the file, the entry point, the common version, and the table.
//!
//! # The loader's lock
//! The system's loader holds a lock while a library's constructors run. The first use of a thread-local value with a destructor
//! takes the same lock, and so does the start of a thread. So a constructor that hangs blocks both. While constructors run, this
//! file uses no such value: it waits with the standard library's `Mutex` and `Condvar`, which are words in memory, and not with
//! its channels or the locks of `parking_lot`, which keep a value for each waiting thread. One library is loaded at a time.

use std::collections::HashMap;
use std::ffi::c_char;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex as StdMutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::elf;
use super::import::Imported;
use super::link::{BROKEN, Link, Poison, error_room, failure};
use super::logging;
use super::raw::{MOST_BYTES, OpenCall, RawHost, RawOpen, RawPlugin, TableCall, read_sized};
use super::rules;
use super::table::{Group, TABLE_VERSIONS, Table};
use highwater_hal::{Backend, BackendTag, Error, ErrorKind, display_foreign, fork::Generation};

/// The symbol that a plugin exports.
pub(super) const ENTRY_POINT: &str = "highwater_plugin";

/// Options of loading a plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The time limit of the library's constructors and its entry point together.
    pub limit: Duration,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LoadOptions {
    /// Returns options with a limit of ten seconds.
    #[must_use]
    pub const fn new() -> Self {
        Self { limit: Duration::from_secs(10) }
    }

    /// Sets the limit.
    #[must_use]
    pub const fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

/// The stage at which the loading of a plugin failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// The file is not a library, or is one for another machine.
    Platform,
    /// The loader could not open it, or it could not be read.
    Library,
    /// The loader did not find a symbol.
    Symbol,
    /// The library has no entry point, or the entry point failed or took too long.
    EntryPoint,
    /// The plugin and this program have no common version of the table.
    Version,
    /// The table is invalid.
    Table,
    /// The backend did not open, for the reason in the error's kind.
    Open,
}

impl Stage {
    /// Returns the stage in words, for messages.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Platform => "wrong platform",
            Self::Library => "not loaded",
            Self::Symbol => "unresolved symbol",
            Self::EntryPoint => "no entry point",
            Self::Version => "version out of range",
            Self::Table => "bad table",
            Self::Open => "not opened",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The reason why a plugin was not loaded, or its backend not opened.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Refusal {
    /// The stage that failed.
    pub stage: Stage,
    /// The slot of the table that is at fault, if it is one.
    pub slot: Option<&'static str>,
    /// The error.
    pub error: Error,
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        refusal.error
    }
}

impl Refusal {
    fn new(stage: Stage, kind: ErrorKind, message: String, hint: &str) -> Self {
        Self { stage, slot: None, error: Error::new(kind, OPERATION, message).with_hint(hint) }
    }

    fn in_slot(mut self, slot: &'static str) -> Self {
        self.slot = Some(slot);
        self
    }
}

const OPERATION: &str = "load";
const NO_PLUGIN: &str = "it is a library, but no plugin of Highwater";

/// A loaded library with a table that this program can use. It is never unloaded.
#[derive(Debug)]
pub struct Plugin {
    name: Arc<str>,
    description: String,
    vendor: String,
    version: String,
    file: PathBuf,
    table_version: u32,
    table: Table,
    open: OpenCall,
    poison: Arc<Poison>,
    loaded_in: Generation,
    watched: Once,
    warnings: Mutex<Vec<String>>,
}

impl Plugin {
    /// Returns the name that opens its backend.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the product that it drives, for people.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Returns its maker.
    #[must_use]
    pub fn vendor(&self) -> &str {
        &self.vendor
    }

    /// Returns its own version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Returns the version of the table that both sides use.
    #[must_use]
    pub fn table_version(&self) -> u32 {
        self.table_version
    }

    /// Returns the file, without symbolic links.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the groups of operations that its table has.
    #[must_use]
    pub fn groups(&self) -> Vec<&'static str> {
        self.table.groups().collect()
    }

    /// Returns the warnings so far: abilities that its devices claim without the slots for them.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().clone()
    }

    /// Opens its backend. Each call opens another one.
    ///
    /// # Errors
    /// All at [`Stage::Open`]: the plugin's own error; `Forked` in a child of the process that loaded it; `ShuttingDown` once
    /// the process exits; `InvalidState` after a panic of the plugin.
    pub fn open(&self) -> Result<Arc<dyn Backend>, Refusal> {
        let refused = |error: Error| Refusal { stage: Stage::Open, slot: Some("open"), error };
        if !self.loaded_in.is_current() {
            return Err(refused(Generation::error("open")));
        }
        if highwater_hal::exit::has_begun() {
            return Err(refused(highwater_hal::exit::error("open")));
        }
        if let Some(error) = self.poison.error(&self.name, "open") {
            return Err(refused(error));
        }
        let tag = BackendTag::next();
        let request = RawOpen { size: size_of::<RawOpen>() as u64, version: self.table_version, tag: tag.get() };
        if rules::are_checked() {
            self.check_open(request).map_err(refused)?;
        }
        let (mut backend, error) = (std::ptr::null_mut(), error_room());
        // SAFETY: the plugin exports the function for this, and all arguments live until it returns.
        let code = unsafe { (self.open)(&raw const request, &raw mut backend, error) };
        // Right after the vendor's initialization, so that the handler runs before the vendor's own.
        self.watched.call_once(highwater_hal::exit::watch);
        if code != 0 {
            return Err(refused(failure(&self.name, &self.poison, "open", "open", code, error)));
        }
        let Some(backend) = NonNull::new(backend) else {
            let message = format!("the plugin `{}` answered in `open` with a null pointer for the backend", self.name);
            return Err(refused(Error::new(ErrorKind::Vendor, "open", message)));
        };
        let link = Link::new(Arc::clone(&self.name), self.table, backend, tag, Arc::clone(&self.poison));
        let mut warn = |what: String| {
            let mut warnings = self.warnings.lock();
            if !warnings.contains(&what) {
                tracing::warn!("the plugin `{}` {what}", self.name);
                warnings.push(what);
            }
        };
        let imported = Imported::new(link, &mut warn).map_err(|error| Refusal { slot: None, ..refused(error) })?;
        Ok(Arc::new(imported))
    }
}

impl Plugin {
    /// Checks that the plugin refuses a request of a later version, and answers nothing.
    fn check_open(&self, request: RawOpen) -> Result<(), Error> {
        const UNKNOWN: u64 = 0x0101_0101_0101_0101;
        /// A request of a later version.
        #[repr(C)]
        struct Later {
            known: RawOpen,
            unknown: u64,
        }
        let size = size_of::<Later>() as u64;
        let later = Later { known: RawOpen { size, ..request }, unknown: UNKNOWN };
        let (mut backend, error) = (std::ptr::null_mut(), error_room());
        // SAFETY: the plugin exports the function for this, and all arguments live until it returns. The request has its size.
        let code = unsafe { (self.open)((&raw const later).cast(), &raw mut backend, error) };
        let broken = |what: &str| {
            let message = format!("the plugin `{}` answered in `open` with {what}", self.name);
            Err(Error::new(ErrorKind::Vendor, "open", message).with_hint(BROKEN))
        };
        match (code, backend.is_null()) {
            (0, _) => broken(
                "success for a longer struct whose unknown bytes are not zero; expected is HW_ERROR_INVALID_ARGUMENT",
            ),
            (_, false) => broken("a backend, although it returned an error; expected is an untouched answer"),
            _ => match failure(&self.name, &self.poison, "open", "open", code, error) {
                fault if matches!(fault.kind(), ErrorKind::Vendor | ErrorKind::InvalidState) => Err(fault),
                _ => Ok(()),
            },
        }
    }
}

/// The identity of a file. A file that was replaced is another plugin.
type FileKey = (u64, u64, i64, i64);

/// The result of loading a file.
enum Loaded {
    Plugin(Arc<Plugin>),
    /// Its constructors or its entry point have not returned.
    Hanging(Refusal),
}

static LOADED: StdMutex<Option<HashMap<FileKey, Loaded>>> = StdMutex::new(None);

/// A load whose constructors run.
struct Constructing {
    file: PathBuf,
    /// True once its limit has passed.
    is_late: bool,
}

/// The load that holds the loader's lock.
static CONSTRUCTING: StdMutex<Option<Constructing>> = StdMutex::new(None);
/// Signaled when it releases the lock.
static CONSTRUCTED: Condvar = Condvar::new();

/// Locks without a thread-local value. Nothing panics while one of these locks is held.
fn lock<T>(mutex: &StdMutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `is_done` holds, for at most `limit`. Returns the value as it is then.
fn wait<'m, T>(
    mutex: &'m StdMutex<T>,
    changed: &Condvar,
    limit: Duration,
    is_done: fn(&T) -> bool,
) -> MutexGuard<'m, T> {
    let waited = changed.wait_timeout_while(lock(mutex), limit, |value| !is_done(value));
    waited.map_or_else(|poisoned| poisoned.into_inner().0, |(guard, _)| guard)
}

/// Returns the error of every opening while the constructors of a plugin exceed their limit, or `None` if none do.
///
/// Such a constructor holds the loader's lock. The process can then start no thread and open no library, and waits forever where
/// it tries.
#[must_use]
pub fn blocked() -> Option<Error> {
    let constructing = lock(&CONSTRUCTING);
    constructing.as_ref().filter(|constructing| constructing.is_late).map(|constructing| blocked_by(&constructing.file))
}

fn blocked_by(file: &Path) -> Error {
    let what = format!(
        "the constructors of {} have not returned, and hold the lock of the system's loader: this process can open no library \
         and start no thread",
        display_foreign(file)
    );
    Error::new(ErrorKind::InvalidState, OPERATION, what).with_hint(BLOCKED_HINT)
}

const BLOCKED_HINT: &str = "end the process with `std::process::abort` or `_exit`, because `exit` hangs; then remove the plugin, or \
                            have it probed in a process of its own";

/// Loads the plugin in `file` for the life of the process. Loading a file again returns the same plugin.
///
/// **A plugin is code.** Its constructors and functions run in this process, with all of its rights. A hostile or broken plugin
/// voids every promise about the process. The call is safe for the same reason as starting a program is: the trust is in the
/// file. The user who names the file, or installs it, vouches for it, and for the clauses that [`Backend`] and
/// [`HostAllocator`](highwater_hal::HostAllocator) list under their `# Safety`. All else is checked: the type and machine of
/// the file, the versions, sizes and slots of the table, and every answer.
///
/// # Errors
/// The fault of the file, the library, its entry point, its versions or its table. `InvalidState` while the constructors of
/// another plugin exceed their limit: see [`blocked`].
///
/// # The limit
/// The call returns when the limit has passed, but the plugin's code cannot be stopped.
/// - If the **entry point** exceeds the limit, one thread keeps running, and nothing else changes.
/// - If a **constructor** exceeds the limit, its thread holds the lock of the system's loader until the constructor returns.
///   Until then, no thread of the process can start a thread, open or close a library, or use a thread-local value with a
///   destructor for the first time: it waits. `std::process::exit` and the return from `main` wait, too.
///   `std::process::abort` and `_exit` end the process. A load in a process of its own avoids all of this, because that process
///   can be killed.
pub fn load(file: &Path, options: &LoadOptions) -> Result<Arc<Plugin>, Refusal> {
    let (file, key) = look_at(file)?;
    if let Some(outcome) = known(key) {
        return outcome;
    }
    if let Some(error) = blocked() {
        return Err(Refusal { stage: Stage::Library, slot: None, error });
    }
    // The plugin may capture streams that this copy of the crate queries.
    highwater_hal::copies::note();
    let plugin = match enter(&file, options.limit) {
        Ok(raw) => Arc::new(check(file, raw)?),
        Err((refusal, hangs)) => {
            if hangs {
                remember(key, Loaded::Hanging(refusal.clone()));
            }
            return Err(refusal);
        }
    };
    remember(key, Loaded::Plugin(Arc::clone(&plugin)));
    // If two threads loaded it at once, the first result counts.
    known(key).unwrap_or(Ok(plugin))
}

fn known(key: FileKey) -> Option<Result<Arc<Plugin>, Refusal>> {
    let loaded = lock(&LOADED);
    Some(match loaded.as_ref()?.get(&key)? {
        Loaded::Plugin(plugin) => Ok(Arc::clone(plugin)),
        Loaded::Hanging(refusal) => Err(refusal.clone()),
    })
}

fn remember(key: FileKey, loaded: Loaded) {
    lock(&LOADED).get_or_insert_default().entry(key).or_insert(loaded);
}

/// Returns the file behind all links, and its identity. Rejects a file that the loader cannot load, with a better message.
fn look_at(file: &Path) -> Result<(PathBuf, FileKey), Refusal> {
    let shown = display_foreign(file).to_string();
    let unread = |error: &std::io::Error| {
        let hint = "check the path, and whether this user may read the file";
        Refusal::new(Stage::Library, ErrorKind::LibraryMissing, format!("{shown}: {error}"), hint)
    };
    let file = file.canonicalize().map_err(|error| unread(&error))?;
    let metadata = file.metadata().map_err(|error| unread(&error))?;
    let other = |what: &str| {
        let hint = "name the plugin's shared library, or install it again, built for this machine";
        Refusal::new(Stage::Platform, ErrorKind::Unsupported, format!("{shown}: {what}"), hint)
    };
    // Checked before it is opened, because opening a pipe waits for a writer.
    if !metadata.is_file() {
        return Err(other("it is no file"));
    }
    let opened = std::fs::File::open(&file).map_err(|error| unread(&error))?;
    if let Some(what) = elf::wrong(&opened, metadata.len()).map_err(|error| unread(&error))? {
        return Err(other(&what));
    }
    // The loader does not tell data from functions, and a call of data ends the process.
    if elf::symbol(&opened, metadata.len(), ENTRY_POINT).map_err(|error| unread(&error))? == Some(elf::Symbol::Other) {
        let message = format!("{shown}: its symbol `{ENTRY_POINT}` is data and no function");
        return Err(Refusal::new(Stage::EntryPoint, ErrorKind::SymbolMissing, message, NO_PLUGIN));
    }
    let key = (metadata.dev(), metadata.ino(), metadata.mtime(), metadata.mtime_nsec());
    Ok((file, key))
}

/// The result of the entry point.
struct Entered(*const RawPlugin);

// SAFETY: a plugin's description is valid for the life of the process, in every thread.
unsafe impl Send for Entered {}

/// The progress of the thread that loads.
enum Progress {
    Constructors,
    EntryPoint,
    Returned(Result<Entered, Refusal>),
    /// It panicked, or the plugin ended it.
    Ended,
}

/// One load, seen by its thread and by the thread that waits for it.
struct Attempt {
    progress: StdMutex<Progress>,
    changed: Condvar,
}

impl Attempt {
    fn set(&self, progress: Progress) {
        *lock(&self.progress) = progress;
        self.changed.notify_all();
    }
}

/// The thread of an attempt. Its drop reports a thread that ends without an answer.
struct Attempting(Arc<Attempt>);

impl Attempting {
    /// Reports that the constructors have returned, and with them the loader's lock.
    fn constructed(&self) {
        self.0.set(Progress::EntryPoint);
        release_loader();
    }
}

impl Drop for Attempting {
    fn drop(&mut self) {
        let mut progress = lock(&self.0.progress);
        let is_constructing = matches!(*progress, Progress::Constructors);
        if !matches!(*progress, Progress::Returned(_)) {
            *progress = Progress::Ended;
        }
        drop(progress);
        if is_constructing {
            release_loader();
        }
        self.0.changed.notify_all();
    }
}

fn release_loader() {
    *lock(&CONSTRUCTING) = None;
    CONSTRUCTED.notify_all();
}

/// Opens the library and calls its entry point in a thread. If it does not return in time, the thread keeps running, and the
/// flag beside the error is true.
fn enter(file: &Path, limit: Duration) -> Result<RawPlugin, (Refusal, bool)> {
    let shown = display_foreign(file).to_string();
    let entered = |message: String, hint: &str| Refusal::new(Stage::EntryPoint, ErrorKind::Vendor, message, hint);
    let began = Instant::now();
    let mut constructing = wait(&CONSTRUCTING, &CONSTRUCTED, limit, |it| it.as_ref().is_none_or(|it| it.is_late));
    if let Some(other) = &*constructing {
        return Err((Refusal { stage: Stage::Library, slot: None, error: blocked_by(&other.file) }, false));
    }
    *constructing = Some(Constructing { file: file.to_owned(), is_late: false });
    drop(constructing);
    let attempt = Arc::new(Attempt { progress: StdMutex::new(Progress::Constructors), changed: Condvar::new() });
    let attempting = Attempting(Arc::clone(&attempt));
    let path = file.to_owned();
    let thread = std::thread::Builder::new().name("highwater-load".to_owned());
    // If the thread does not start, the closure is dropped, which releases the loader.
    let spawned = thread.spawn(move || {
        let called = call_entry(&path, &attempting);
        attempting.0.set(Progress::Returned(called));
    });
    if let Err(error) = spawned {
        let message = format!("{shown}: no thread for its entry point: {error}");
        let refusal =
            Refusal::new(Stage::EntryPoint, ErrorKind::OperatingSystem, message, "end threads, or raise the limit");
        return Err((refusal, false));
    }
    let left = limit.saturating_sub(began.elapsed());
    let mut progress =
        wait(&attempt.progress, &attempt.changed, left, |it| matches!(it, Progress::Returned(_) | Progress::Ended));
    let report = "report it to the plugin's maker";
    let Entered(plugin) = match std::mem::replace(&mut *progress, Progress::Ended) {
        Progress::Returned(called) => called.map_err(|refusal| (refusal, false))?,
        Progress::Ended => {
            return Err((entered(format!("{shown}: the library ended the thread that loaded it"), report), false));
        }
        Progress::EntryPoint => {
            *progress = Progress::EntryPoint;
            let message = format!("{shown}: its entry point `{ENTRY_POINT}` did not come back within {limit:?}");
            let hint = "report it to the plugin's maker; restart the process to try again";
            return Err((entered(message, hint), true));
        }
        Progress::Constructors => {
            *progress = Progress::Constructors;
            // The thread releases the loader only after it has changed its progress.
            if let Some(constructing) = &mut *lock(&CONSTRUCTING) {
                constructing.is_late = true;
            }
            CONSTRUCTED.notify_all();
            let message = format!(
                "{shown}: the library's constructors did not come back within {limit:?}, and hold the lock of the system's \
                 loader: this process can open no library and start no thread"
            );
            return Err((entered(message, BLOCKED_HINT), true));
        }
    };
    let mut spare = MaybeUninit::uninit();
    // SAFETY: the entry point returns null or a struct that begins with its size (the contract of the header).
    let plugin = unsafe { read_sized(plugin, &mut spare) }.map_err(|what| {
        let message = format!("{shown}: the entry point `{ENTRY_POINT}` answered with {what}");
        (entered(message, "report it to the plugin's maker"), false)
    })?;
    Ok(*plugin)
}

fn call_entry(file: &Path, attempting: &Attempting) -> Result<Entered, Refusal> {
    type EntryPoint = unsafe extern "C" fn(*const RawHost) -> *const RawPlugin;
    const RTLD_NODELETE: i32 = libc::RTLD_NODELETE;
    static HOST: RawHost = RawHost {
        size: size_of::<RawHost>() as u64,
        version_min: *TABLE_VERSIONS.start(),
        version_max: *TABLE_VERSIONS.end(),
        log: Some(logging::take),
    };
    let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | RTLD_NODELETE;
    // SAFETY: the user who named the file vouches for the library's constructors (see `load`).
    let library = unsafe { libloading::os::unix::Library::open(Some(file), flags) };
    attempting.constructed();
    let library = library.map_err(|error| {
        // The outer error only states that the call failed. The loader's message is its source.
        let text = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        let symbol = text.contains("undefined symbol") || text.contains("symbol lookup error");
        let stage = if symbol { Stage::Symbol } else { Stage::Library };
        let kind = if symbol { ErrorKind::SymbolMissing } else { ErrorKind::LibraryMissing };
        Refusal::new(stage, kind, text, "install what the loader says is missing, or another build of the plugin")
    })?;
    // SAFETY: the symbol has this type by the contract of the header.
    let entry = unsafe { library.get::<EntryPoint>(ENTRY_POINT.as_bytes()) }.map(|symbol| *symbol);
    // The plugin's threads, exit handlers and tables outlive every user.
    std::mem::forget(library);
    let Ok(entry) = entry else {
        let message = format!("{}: it has no entry point `{ENTRY_POINT}`", display_foreign(file));
        return Err(Refusal::new(Stage::EntryPoint, ErrorKind::SymbolMissing, message, NO_PLUGIN));
    };
    // SAFETY: as above, and the program's offer is valid for the life of the process.
    let plugin = unsafe { entry(&raw const HOST) };
    if plugin.is_null() {
        let message = format!("{}: the entry point `{ENTRY_POINT}` refused this program", display_foreign(file));
        let hint = "its log lines may say why; the plugin may be for another version";
        return Err(Refusal::new(Stage::EntryPoint, ErrorKind::Unsupported, message, hint));
    }
    Ok(Entered(plugin))
}

/// Checks the description of a plugin, and its table.
fn check(file: PathBuf, raw: RawPlugin) -> Result<Plugin, Refusal> {
    let shown = display_foreign(&file).to_string();
    let bad = |what: String| {
        let hint = "report it to the plugin's maker";
        Refusal::new(Stage::Table, ErrorKind::Unsupported, format!("{shown}: {what}"), hint)
    };
    // SAFETY: a plugin's texts are valid for the life of the process (the contract of the header).
    let text = |pointer, what| unsafe { read_text(pointer) }.map_err(|wrong| bad(format!("its {what} is {wrong}")));
    let name = text(raw.name, "name")?;
    let letters = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
    if name.is_empty() || name.len() > 63 || !name.chars().all(letters) {
        return Err(bad(format!("its name is {name:?}; expected are 1 to 63 letters, digits, `-` and `_`")));
    }
    let (description, vendor) = (text(raw.description, "description")?, text(raw.vendor, "vendor")?);
    let version = text(raw.version, "version")?;
    let lowest = raw.version_min.max(*TABLE_VERSIONS.start());
    let highest = raw.version_max.min(*TABLE_VERSIONS.end());
    if lowest > highest || raw.version_min > raw.version_max || raw.version_min == 0 {
        let message = format!(
            "{shown}: it has the versions {} to {} of the table, and this program {} to {}",
            raw.version_min,
            raw.version_max,
            TABLE_VERSIONS.start(),
            TABLE_VERSIONS.end()
        );
        let hint = if raw.version_min > *TABLE_VERSIONS.end() { "update the program" } else { "update the plugin" };
        return Err(Refusal::new(Stage::Version, ErrorKind::Unsupported, message, hint));
    }
    let open: OpenCall = raw.open.ok_or_else(|| bad("its `open` is null".to_owned()).in_slot("open"))?;
    let table: TableCall = raw.table.ok_or_else(|| bad("its `table` is null".to_owned()).in_slot("table"))?;
    // SAFETY: the plugin exports the function for this.
    let table = unsafe { table(highest) };
    // SAFETY: the function returns null or a table that begins with its size (the contract of the header).
    let table =
        unsafe { read_table(table.cast()) }.map_err(|what| bad(format!("its table of version {highest} {what}")))?;
    for &group in Group::ALL {
        match table.group(group) {
            Ok(false) if group == Group::Required => {
                return Err(bad("its table has none of the required slots".to_owned()));
            }
            Ok(_) => {}
            Err(slot) => {
                let what = format!("its table lacks the slot `{slot}`, and has others of the group `{}`", group.name());
                return Err(bad(what).in_slot(slot));
            }
        }
    }
    Ok(Plugin {
        name: name.into(),
        description,
        vendor,
        version,
        file,
        table_version: highest,
        table,
        open,
        poison: Arc::default(),
        loaded_in: Generation::current(),
        watched: Once::new(),
        warnings: Mutex::default(),
    })
}

/// Reads a text of a plugin.
///
/// # Safety
/// `pointer` must be null, or readable up to a NUL or for 4096 bytes.
unsafe fn read_text(pointer: *const c_char) -> Result<String, &'static str> {
    const MOST: usize = 4096;
    if pointer.is_null() {
        return Err("null");
    }
    // SAFETY: the caller ensures it, and nothing after the NUL is read.
    let bytes = (0..MOST).map(|place| unsafe { pointer.add(place).read() }.cast_unsigned());
    let text: Vec<u8> = bytes.take_while(|&byte| byte != 0).collect();
    if text.len() == MOST {
        return Err("a text of 4096 bytes without a NUL");
    }
    String::from_utf8(text).map_err(|_| "a text that is not UTF-8")
}

/// Copies the slots of a plugin's table that this program knows. Missing slots are null.
///
/// # Safety
/// `pointer` must be null, or its first eight bytes must be readable and give the number of readable bytes.
unsafe fn read_table(pointer: *const Table) -> Result<Table, String> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err("is null or not aligned".to_owned());
    }
    // SAFETY: the caller ensures it.
    let bytes = unsafe { pointer.cast::<u64>().read() };
    let least = Table::least_bytes() as u64;
    if bytes < least || bytes > MOST_BYTES || bytes % 8 != 0 {
        return Err(format!("says it has {bytes} bytes; expected are {least} or more, in multiples of 8"));
    }
    let mut table = Table::EMPTY;
    let known = (bytes as usize).min(size_of::<Table>());
    // SAFETY: both have that many bytes. By the contract of the header, a slot is null or a function of its type.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut table).cast::<u8>(), known) };
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_refused_before_it_is_opened() {
        let load = |file: &str| load(Path::new(file), &LoadOptions::new()).unwrap_err();
        assert_eq!(load("/dev/null").stage, Stage::Platform);
        assert_eq!(load("/").stage, Stage::Platform);
        let absent = load("/no/such/file.so");
        assert_eq!((absent.stage, absent.error.kind()), (Stage::Library, ErrorKind::LibraryMissing));
        assert!(absent.to_string().contains("/no/such/file.so"), "{absent}");
    }

    #[test]
    fn a_library_without_the_entry_point_is_no_plugin() {
        let library = [
            "/lib/x86_64-linux-gnu/libm.so.6",
            "/lib64/libm.so.6",
            "/usr/lib/libm.so.6",
            "/lib/aarch64-linux-gnu/libm.so.6",
        ]
        .into_iter()
        .find(|path| Path::new(path).exists())
        .unwrap();
        let refusal = load(Path::new(library), &LoadOptions::new()).unwrap_err();
        assert_eq!(refusal.stage, Stage::EntryPoint);
        assert!(refusal.to_string().contains(ENTRY_POINT), "{refusal}");
    }

    #[test]
    fn tables_of_other_sizes_are_refused_or_cut() {
        let read = |table: &Table| {
            // SAFETY: sizes that would be read past the table are not given.
            unsafe { read_table(table) }
        };
        let mut table = Table::EMPTY;
        for size in [0, 8, Table::least_bytes() as u64 - 8, u64::MAX, Table::least_bytes() as u64 + 4] {
            table.size = size;
            assert!(read(&table).unwrap_err().contains(&size.to_string()));
        }
        table.size = Table::least_bytes() as u64;
        assert!(read(&table).is_ok());
        // SAFETY: null is allowed.
        assert!(unsafe { read_table(std::ptr::null()) }.is_err());
    }

    #[test]
    fn a_text_without_an_end_is_refused() {
        let endless = vec![b'a'; 5000];
        // SAFETY: there are more than 4096 bytes.
        assert!(unsafe { read_text(endless.as_ptr().cast()) }.unwrap_err().contains("without a NUL"));
        // SAFETY: a text with a NUL, and null.
        unsafe {
            assert_eq!(read_text(c"name".as_ptr()).unwrap(), "name");
            assert!(read_text(c"\xff".as_ptr()).unwrap_err().contains("UTF-8"));
            assert!(read_text(std::ptr::null()).is_err());
        }
    }
}
