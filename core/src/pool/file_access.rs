//! Who may write a file of page-locked memory.

/// Who may write the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileAccess {
    /// The buffer that the memory was made for.
    Private,
    /// Nobody. Importers cannot map it for writing.
    ReadOnly,
    /// Nobody. Importers map it for writing, because their devices may need that.
    ReadOnlyByAgreement,
    /// Every process, by the promise of the exporter.
    Writable,
}
