//! Gangs: pods of a namespace that run together or not at all, as their annotations say.

use std::collections::BTreeMap;

use crate::names::{GANG, GANG_SIZE};

/// Most pods that must run together.
pub const MAX_SIZE: u32 = 1000;

/// The gang that a pod is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gang {
    /// Unique in the namespace.
    pub name: String,
    /// So many of its pods must run together.
    pub size: u32,
}

/// The gang that a pod with these annotations is of, if any.
///
/// # Errors
/// A sentence that names the annotation and says what would be right.
pub fn read(annotations: Option<&BTreeMap<String, String>>) -> Result<Option<Gang>, String> {
    let text = |name: &str| annotations.and_then(|all| all.get(name));
    let (name, size) = match (text(GANG), text(GANG_SIZE)) {
        (None, None) => return Ok(None),
        (Some(name), Some(size)) => (name, size),
        (Some(_), None) => {
            return Err(format!(
                "annotation {GANG} needs {GANG_SIZE} beside it: how many of the gang's pods must run together"
            ));
        }
        (None, Some(_)) => {
            return Err(format!("annotation {GANG_SIZE} needs {GANG} beside it: the gang's name"));
        }
    };
    if !is_dns_label(name) {
        return Err(format!(
            "annotation {GANG}: {name:?} is no name for a gang: that is up to 63 lower-case letters, digits and '-', \
             the first and last no '-'"
        ));
    }
    let number = size.parse().ok().filter(|n| (1..=MAX_SIZE).contains(n) && n.to_string() == *size);
    let Some(size) = number else {
        return Err(format!("annotation {GANG_SIZE}: {size:?} is no whole number from 1 to {MAX_SIZE}"));
    };
    Ok(Some(Gang { name: name.clone(), size }))
}

fn is_dns_label(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(allowed)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(annotations: &[(&str, &str)]) -> Result<Option<Gang>, String> {
        let all = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        read(Some(&all.collect()))
    }

    #[test]
    fn both_annotations_make_a_gang_and_none_makes_none() {
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(read(None), Ok(None));
        for size in [1, 4, MAX_SIZE] {
            let gang = Gang { name: "train-7b".into(), size };
            assert_eq!(of(&[(GANG, "train-7b"), (GANG_SIZE, &size.to_string())]), Ok(Some(gang)));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(of(&[(GANG, "g")]).unwrap_err().contains("kerf.dev/gang needs kerf.dev/gang-size"));
        assert!(of(&[(GANG_SIZE, "2")]).unwrap_err().contains("kerf.dev/gang-size needs kerf.dev/gang "));
        let long = "a".repeat(64);
        for name in ["", "Train", "a.b", "-a", "a-", &long] {
            let error = of(&[(GANG, name), (GANG_SIZE, "2")]).unwrap_err();
            assert!(error.starts_with("annotation kerf.dev/gang: "), "{error}");
        }
        for size in ["", "0", "-1", "+2", "02", "1.5", "1001", "99999999999", "two"] {
            let error = of(&[(GANG, "g"), (GANG_SIZE, size)]).unwrap_err();
            assert!(error.starts_with("annotation kerf.dev/gang-size: "), "{error}");
        }
    }
}
