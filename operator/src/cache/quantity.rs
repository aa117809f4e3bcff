//! Kubernetes quantities as whole thousandths.
//!
//! Grammar and suffixes: `k8s.io/apimachinery/pkg/api/resource.Quantity` (decimal SI, binary SI, decimal exponent).

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The quantity in thousandths of its unit, rounded up as Kubernetes does; `None` if it is not one or does not fit.
pub fn milli(quantity: &Quantity) -> Option<i128> {
    parse_milli(&quantity.0)
}

/// See [`milli`].
pub fn parse_milli(text: &str) -> Option<i128> {
    let text = text.trim();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = digits.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(digits.len());
    let (number, suffix) = digits.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let mantissa: i128 = format!("{whole}{fraction}").parse().ok()?;
    // value × 1000 = mantissa × numerator / denominator
    let mut denominator = 10i128.checked_pow(fraction.len().try_into().ok()?)?;
    let mut numerator = 1000i128;
    match suffix {
        "n" => denominator = denominator.checked_mul(1_000_000_000)?,
        "u" => denominator = denominator.checked_mul(1_000_000)?,
        "m" => denominator = denominator.checked_mul(1000)?,
        "" => {}
        "k" => numerator *= 1000,
        "M" => numerator *= 1_000_000,
        "G" => numerator *= 1_000_000_000,
        "T" => numerator *= 1_000_000_000_000,
        "P" => numerator *= 1_000_000_000_000_000,
        "E" => numerator *= 1_000_000_000_000_000_000,
        "Ki" => numerator <<= 10,
        "Mi" => numerator <<= 20,
        "Gi" => numerator <<= 30,
        "Ti" => numerator <<= 40,
        "Pi" => numerator <<= 50,
        "Ei" => numerator <<= 60,
        exponent => {
            let exponent: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            let power = 10i128.checked_pow(exponent.unsigned_abs())?;
            if exponent < 0 {
                denominator = denominator.checked_mul(power)?;
            } else {
                numerator = numerator.checked_mul(power)?;
            }
        }
    }
    let scaled = mantissa.checked_mul(numerator)?;
    let rounded = scaled / denominator + i128::from(scaled % denominator != 0);
    Some(if negative { -rounded } else { rounded })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_a_quantity_is_read() {
        for (text, expected) in [
            ("1", Some(1000)),
            ("250m", Some(250)),
            ("0.5", Some(500)),
            (".5", Some(500)),
            ("1.5Gi", Some(1_610_612_736_000)),
            ("1k", Some(1_000_000)),
            ("1e3", Some(1_000_000)),
            ("1E", Some(1_000_000_000_000_000_000_000)),
            ("12e-4", Some(2)),
            ("100n", Some(1)),
            ("-1", Some(-1000)),
            ("", None),
            ("1x", None),
            ("1..2", None),
            ("Gi", None),
        ] {
            assert_eq!(parse_milli(text), expected, "{text:?}");
        }
    }
}
