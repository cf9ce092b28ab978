//! Backends that are loaded at run time from a library with one entry point.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::Backend;
use crate::driver::Library;
use crate::error::{Error, ErrorKind};

/// The versions of the table that this program understands.
pub const TABLE_VERSIONS: RangeInclusive<u32> = 1..=1;

/// How a plugin is loaded.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoadOptions {
    /// How long the entry point may take.
    pub limit: Duration,
}

impl LoadOptions {
    /// The defaults: 10 s for the entry point.
    #[must_use]
    pub fn new() -> Self {
        Self { limit: Duration::from_secs(10) }
    }

    /// The same with another limit.
    #[must_use]
    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// How far a plugin got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// It cannot be opened: the loader's own text.
    Library,
    /// It is an ELF file of another machine, or no library at all.
    WrongPlatform,
    /// It needs a symbol that nobody has: the loader's own text.
    Symbol,
    /// It has no entry point, or that failed, or took longer than the limit.
    EntryPoint,
    /// Its versions of the table are out of range.
    Version,
    /// Its table is bad: sizes, null slots.
    Table,
    /// Its backend did not open.
    Open,
}

/// Why a plugin was refused.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// How far it got.
    pub stage: Stage,
    /// The slot of its table that is at fault.
    pub slot: Option<String>,
    /// What was wrong.
    pub error: Error,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Refusal {}

/// A plugin that was loaded.
#[derive(Debug)]
pub struct Plugin {
    never: std::convert::Infallible,
}

#[allow(missing_docs, reason = "the shape of what comes")]
impl Plugin {
    #[must_use]
    pub fn name(&self) -> &str {
        match self.never {}
    }
    #[must_use]
    pub fn description(&self) -> &str {
        match self.never {}
    }
    #[must_use]
    pub fn vendor(&self) -> &str {
        match self.never {}
    }
    #[must_use]
    pub fn plugin_version(&self) -> &str {
        match self.never {}
    }
    #[must_use]
    pub fn table_version(&self) -> u32 {
        match self.never {}
    }
    #[must_use]
    pub fn file(&self) -> &Path {
        match self.never {}
    }
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        match self.never {}
    }
    pub fn open(self: &Arc<Self>) -> Result<Arc<dyn Backend>, Refusal> {
        match self.never {}
    }
}

/// Opens a library and asks its entry point.
///
/// # Errors
/// How far it got, and what was wrong.
pub fn load(file: &Path, _options: &LoadOptions) -> Result<Arc<Plugin>, Refusal> {
    let refuse =
        |stage, kind, what: String| Refusal { stage, slot: None, error: Error::new(kind, "load_plugin", what) };
    let mut header = [0_u8; 20];
    let read = File::open(file).and_then(|mut file| file.read_exact(&mut header));
    let machine: u8 = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
    if read.is_err() || !header.starts_with(b"\x7fELF") || header[18] != machine {
        return Err(refuse(Stage::WrongPlatform, ErrorKind::Unsupported, "it is no library of this machine".into()));
    }
    // SAFETY: the caller decided to run this plugin's code.
    let library = unsafe { Library::open(file) }.map_err(|failure| {
        let stage = if failure.reason.contains("undefined symbol") { Stage::Symbol } else { Stage::Library };
        refuse(stage, ErrorKind::LibraryMissing, failure.reason)
    })?;
    if !library.has_symbol("highwater_plugin") {
        let what = "it has no entry point `highwater_plugin`".to_owned();
        return Err(refuse(Stage::EntryPoint, ErrorKind::SymbolMissing, what));
    }
    Err(refuse(Stage::Table, ErrorKind::Unsupported, "this version does not load plugins yet".into()))
}
