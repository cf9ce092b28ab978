//! Workspace sizes from environment variables, in the formats that cuBLAS users know.
//!
//! A BLAS variable holds `:KiB:COUNT` pairs that are summed (`:4096:2:16:8` is 2 x 4 MiB + 8 x 16 KiB); an Lt variable
//! holds KiB. The backend decides which variables apply ([`Identity`](crate::Identity)). A value that cannot be parsed causes a
//! warning and is ignored, as in the vendors' own libraries.

use std::env;

use highwater_hal::display_foreign;

/// Returns the bytes of a `:KiB:COUNT` list.
fn parse_pairs(text: &str) -> Option<usize> {
    let mut numbers = text.trim().strip_prefix(':')?.split(':').map(|number| number.parse::<usize>().ok());
    let mut bytes = 0_usize;
    while let Some(kib) = numbers.next() {
        let count = numbers.next()??;
        bytes = bytes.checked_add(kib?.checked_mul(count)?.checked_mul(1024)?)?;
    }
    Some(bytes)
}

/// Returns the bytes of a number of KiB.
fn parse_kib(text: &str) -> Option<usize> {
    text.trim().parse::<usize>().ok()?.checked_mul(1024)
}

fn from_variables(
    variables: &[&str],
    lookup: impl Fn(&str) -> Option<String>,
    parse: fn(&str) -> Option<usize>,
    format: &str,
    default: usize,
) -> usize {
    for variable in variables {
        // As in a shell, an empty variable is not set.
        let Some(text) = lookup(variable).filter(|text| !text.is_empty()) else { continue };
        return parse(&text).filter(|&bytes| isize::try_from(bytes).is_ok()).unwrap_or_else(|| {
            crate::warnings::warning!(
                "{variable}={} is not {format}; correct or unset it; the default of {default} bytes is used",
                display_foreign(&text)
            );
            default
        });
    }
    default
}

/// Returns the bytes of the BLAS workspace: the first of `variables` that is set, else `default`.
pub(crate) fn blas_workspace_bytes(variables: &[&str], default: usize) -> usize {
    from_variables(
        variables,
        |name| env::var(name).ok(),
        parse_pairs,
        "of the form :KiB:COUNT, such as :4096:8",
        default,
    )
}

/// Returns the bytes of the Lt workspace: the first of `variables` that is set, else `default`.
pub(crate) fn lt_workspace_bytes(variables: &[&str], default: usize) -> usize {
    from_variables(
        variables,
        |name| env::var(name).ok(),
        parse_kib,
        "a whole number of KiB, such as 81920 for 80 MiB",
        default,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_summed() {
        assert_eq!(parse_pairs(":4096:8"), Some(32 << 20));
        assert_eq!(parse_pairs(":4096:2:16:8"), Some(8_519_680));
        assert_eq!(parse_pairs(":0:0"), Some(0));
        for bad in ["", ":", "4096:8", ":4096", ":4096:8:", ":4096:x", ":-1:8", ":18446744073709551615:2"] {
            assert_eq!(parse_pairs(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_first_variable_that_is_set_counts_and_nonsense_gives_the_default() {
        let lookup = |name: &str| match name {
            "SECOND" => Some("2048".to_owned()),
            "THIRD" => Some("1".to_owned()),
            "NONSENSE" => Some("many".to_owned()),
            _ => None,
        };
        let bytes = |variables: &[&str]| from_variables(variables, lookup, parse_kib, "KiB", 77);
        assert_eq!(bytes(&["FIRST", "SECOND", "THIRD"]), 2 << 20);
        assert_eq!(bytes(&["FIRST"]), 77);
        assert_eq!(bytes(&["NONSENSE", "SECOND"]), 77);
    }
}
