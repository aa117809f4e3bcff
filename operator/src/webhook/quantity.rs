//! Kubernetes quantities, as far as counts of devices and bytes need them.

/// Why a quantity is no count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoCount {
    /// Not a quantity at all.
    Malformed,
    Negative,
    Fractional,
    /// More than `u64` holds.
    Huge,
}

/// The whole, non-negative number that a quantity such as `2`, `2000m` or `1k` stands for.
///
/// The grammar is that of `k8s.io/apimachinery/pkg/api/resource.Quantity`: a signed decimal number and one suffix, which
/// is decimal (`n u m k M G T P E`), binary (`Ki` … `Ei`) or an exponent (`e3`).
pub(super) fn count(text: &str) -> Result<u64, NoCount> {
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(NoCount::Malformed);
    }
    let (multiplier, exponent) = scale(suffix).ok_or(NoCount::Malformed)?;
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Ok(0);
    }
    if negative {
        return Err(NoCount::Negative);
    }
    if digits.len() > 20 {
        return Err(if exponent - (fraction.len() as i32) < -20 {
            NoCount::Fractional
        } else {
            NoCount::Huge
        });
    }
    // At most 20 digits times at most 2^60 fits in 128 bits.
    let value = digits.parse::<u128>().map_err(|_| NoCount::Malformed)? * multiplier;
    let exponent = exponent - fraction.len() as i32;
    let power = 10u128.checked_pow(exponent.unsigned_abs());
    let count = match (exponent < 0, power) {
        (false, Some(power)) => value.checked_mul(power).ok_or(NoCount::Huge)?,
        (false, None) => return Err(NoCount::Huge),
        (true, Some(power)) if value % power == 0 => value / power,
        (true, _) => return Err(NoCount::Fractional),
    };
    u64::try_from(count).map_err(|_| NoCount::Huge)
}

/// A suffix as factor and power of ten.
fn scale(suffix: &str) -> Option<(u128, i32)> {
    Some(match suffix {
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "" => (1, 0),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            (1, exponent.clamp(-1000, 1000))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_in_every_spelling() {
        for (text, expected) in [
            ("0", 0),
            ("1", 1),
            ("+7", 7),
            ("2000m", 2),
            ("1.0", 1),
            ("0.5k", 500),
            ("3e0", 3),
            ("20e-1", 2),
            ("1Ki", 1024),
            ("-0", 0),
            ("12Gi", 12 << 30),
        ] {
            assert_eq!(count(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn everything_else_says_why_not() {
        for (text, expected) in [
            ("", NoCount::Malformed),
            ("one", NoCount::Malformed),
            ("1x", NoCount::Malformed),
            ("1.2.3", NoCount::Malformed),
            (".", NoCount::Malformed),
            ("-1", NoCount::Negative),
            ("500m", NoCount::Fractional),
            ("0.5", NoCount::Fractional),
            ("1e-999999", NoCount::Fractional),
            ("20E", NoCount::Huge),
            ("1e999999", NoCount::Huge),
            ("99Ei", NoCount::Huge),
            ("99999999999999999999999999", NoCount::Huge),
        ] {
            assert_eq!(count(text), Err(expected), "{text}");
        }
    }
}
