//! Quantities as the API server writes them.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// A quantity in its canonical text, so that the API server gives it back as it was written: the largest suffix that
/// leaves a whole number, binary where the number is a multiple of 1024, else decimal.
pub fn quantity(value: u64) -> Quantity {
    Quantity(text(value))
}

/// So many thousandths, likewise.
pub fn milli_quantity(milli: u64) -> Quantity {
    if milli.is_multiple_of(1000) { quantity(milli / 1000) } else { Quantity(format!("{milli}m")) }
}

fn text(value: u64) -> String {
    let by = |base: u64, suffixes: [&str; 7]| {
        let mut value = value;
        let mut used = 0;
        while used + 1 < suffixes.len() && value != 0 && value.is_multiple_of(base) {
            value /= base;
            used += 1;
        }
        format!("{value}{}", suffixes[used])
    };
    if value != 0 && value.is_multiple_of(1024) {
        by(1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"])
    } else {
        by(1000, ["", "k", "M", "G", "T", "P", "E"])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousandths_are_written_only_where_there_are_some() {
        assert_eq!([30_000, 12_500, 0].map(|milli| milli_quantity(milli).0), ["30", "12500m", "0"]);
    }

    #[test]
    fn quantities_are_written_as_the_api_server_writes_them() {
        for (value, text) in [
            (0, "0"),
            (14, "14"),
            (1024, "1Ki"),
            (10 << 30, "10Gi"),
            (10_000_000_000, "9765625Ki"),
            (42_000_000_001_000, "42000000001k"),
            (85_520_809_984, "81559Mi"),
            (1_536, "1536"),
            (999_999, "999999"),
        ] {
            assert_eq!(quantity(value).0, text, "{value}");
        }
    }
}
