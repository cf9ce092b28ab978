//! The meaning of a vendor's codes, as a table.

use highwater_hal::{Error, ErrorKind};

/// A code and its meaning.
#[derive(Debug, Clone, Copy)]
pub struct Code {
    /// The vendor's number.
    pub code: i32,
    /// The vendor's name of the code.
    pub name: &'static str,
    /// The kind of error, which tells a program how to react.
    pub kind: ErrorKind,
    /// The remedy in words; may be empty.
    pub hint: &'static str,
}

impl Code {
    /// Creates a row of the table.
    #[must_use]
    pub const fn new(code: i32, name: &'static str, kind: ErrorKind, hint: &'static str) -> Self {
        Self { code, name, kind, hint }
    }
}

/// The codes of one vendor library.
#[derive(Debug, Clone, Copy)]
pub struct Codes {
    /// The library's name in messages: `CUDA`.
    pub library: &'static str,
    /// The known codes, in any order.
    pub rows: &'static [Code],
}

impl Codes {
    /// Returns the row of a code.
    #[must_use]
    pub fn find(&self, code: i32) -> Option<&'static Code> {
        self.rows.iter().find(|row| row.code == code)
    }

    /// Returns the error of a call that returned `code`. An unknown code is `Vendor`.
    #[cold]
    #[must_use]
    pub fn error(&self, operation: &'static str, code: i32) -> Error {
        match self.find(code) {
            Some(row) => Error::new(row.kind, operation, format!("{} returned {}", self.library, row.name))
                .with_code(i64::from(code))
                .with_hint(row.hint),
            None => {
                let message = format!("{} returned the code {code}, which this version does not know", self.library);
                Error::new(ErrorKind::Vendor, operation, message)
                    .with_code(i64::from(code))
                    .with_hint("look the code up in the vendor's manual")
            }
        }
    }

    /// Converts a code: 0 is success.
    ///
    /// # Errors
    /// The error of [`Codes::error`] for every other code.
    #[inline(always)]
    pub fn check(&self, operation: &'static str, code: i32) -> highwater_hal::Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error(operation, code)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODES: Codes =
        Codes { library: "Test", rows: &[Code::new(2, "TEST_NO_MEMORY", ErrorKind::OutOfMemory, "free some")] };

    #[test]
    fn a_known_code_keeps_its_number_name_and_hint() {
        let error = CODES.error("allocate", 2);
        assert_eq!((error.kind(), error.code(), error.hint()), (ErrorKind::OutOfMemory, Some(2), "free some"));
        assert!(error.message().contains("Test returned TEST_NO_MEMORY"), "{error}");
        assert!(CODES.check("allocate", 0).is_ok());
    }

    #[test]
    fn an_unknown_code_is_an_error_that_names_it() {
        let error = CODES.check("allocate", 921).unwrap_err();
        assert_eq!((error.kind(), error.code()), (ErrorKind::Vendor, Some(921)));
        assert!(error.message().contains("921"), "{error}");
    }
}
