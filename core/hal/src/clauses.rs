//! Every clause of the traits as data. The conformance suite proves them, and the C header states them.

/// One promise of the traits.
///
/// The documentation of the traits is the source of the clauses. The build of this crate makes this table from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Clause {
    /// Its id, such as `stream.order`. Cases name it.
    pub id: &'static str,
    /// The trait that promises it.
    pub of: &'static str,
    /// The method that promises it; `None` for the trait as a whole.
    pub method: Option<&'static str>,
    /// The promise, in the words of the documentation.
    pub promise: &'static str,
}

include!(concat!(env!("OUT_DIR"), "/clauses.rs"));

/// Every clause, in the order of the traits.
///
/// ```
/// let order = highwater_hal::clauses().iter().find(|clause| clause.id == "stream.order").unwrap();
/// assert_eq!((order.of, order.method), ("Backend", Some("create_stream")));
/// ```
#[must_use]
pub fn clauses() -> &'static [Clause] {
    CLAUSES
}
