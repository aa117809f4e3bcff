//! Label selectors as the API server would check them, had it a schema that can say it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::denial::Denial;

/// Longest name part of a label key, and longest label value.
const MAX_NAME: usize = 63;
/// Longest prefix of a label key.
const MAX_PREFIX: usize = 253;

/// Everything wrong with a selector at `path`.
pub(super) fn check(selector: &LabelSelector, path: &str) -> Vec<Denial> {
    let mut denials = Vec::new();
    for (key, value) in selector.match_labels.iter().flatten() {
        let field = format!("{path}.matchLabels[{key}]");
        denials.extend(check_key(key, &field));
        denials.extend(check_value(value, &field));
    }
    for (index, requirement) in selector.match_expressions.iter().flatten().enumerate() {
        let field = format!("{path}.matchExpressions[{index}]");
        denials.extend(check_key(&requirement.key, &format!("{field}.key")));
        let values = requirement.values.as_deref().unwrap_or_default();
        match requirement.operator.as_str() {
            "In" | "NotIn" if values.is_empty() => denials.push(Denial::invalid(
                format!("{field}.values"),
                format!(
                    "operator {} needs at least one value; to ask for the label alone use Exists",
                    requirement.operator
                ),
            )),
            "Exists" | "DoesNotExist" if !values.is_empty() => denials.push(Denial::invalid(
                format!("{field}.values"),
                format!(
                    "operator {} takes no values; leave them out or use In or NotIn",
                    requirement.operator
                ),
            )),
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            other => denials.push(Denial::invalid(
                format!("{field}.operator"),
                format!("'{other}' is no operator; the operators are In, NotIn, Exists and DoesNotExist"),
            )),
        }
        for (value_index, value) in values.iter().enumerate() {
            denials.extend(check_value(value, &format!("{field}.values[{value_index}]")));
        }
    }
    denials
}

fn check_key(key: &str, field: &str) -> Option<Denial> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    let valid = is_name(name) && prefix.is_none_or(is_domain);
    (!valid).then(|| {
        Denial::invalid(
            field,
            format!(
                "'{key}' is no label key: a key is up to {MAX_NAME} letters, digits, '-', '_' and '.', with a letter or \
                 digit at both ends, after an optional domain and '/', as in `nvidia.com/gpu.product`"
            ),
        )
    })
}

fn check_value(value: &str, field: &str) -> Option<Denial> {
    (!value.is_empty() && !is_name(value)).then(|| {
        Denial::invalid(
            field,
            format!(
                "'{value}' is no label value: a value is empty or up to {MAX_NAME} letters, digits, '-', '_' and '.', with \
                 a letter or digit at both ends; wildcards are not known to label selectors"
            ),
        )
    })
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric())
}

fn is_domain(domain: &str) -> bool {
    (1..=MAX_PREFIX).contains(&domain.len())
        && domain.split('.').all(|label| {
            !label.is_empty()
                && label.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelectorRequirement;

    use super::*;

    fn requirement(key: &str, operator: &str, values: &[&str]) -> LabelSelector {
        LabelSelector {
            match_expressions: Some(vec![LabelSelectorRequirement {
                key: key.to_owned(),
                operator: operator.to_owned(),
                values: (!values.is_empty())
                    .then(|| values.iter().map(|value| (*value).to_owned()).collect()),
            }]),
            match_labels: None,
        }
    }

    fn labels(key: &str, value: &str) -> LabelSelector {
        LabelSelector {
            match_labels: Some([(key.to_owned(), value.to_owned())].into()),
            match_expressions: None,
        }
    }

    #[test]
    fn good_selectors_pass() {
        for selector in [
            LabelSelector::default(),
            labels("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-80GB"),
            labels("pool", ""),
            requirement("pool", "In", &["a", "b"]),
            requirement("pool", "DoesNotExist", &[]),
        ] {
            assert_eq!(check(&selector, "spec.nodeSelector"), []);
        }
    }

    #[test]
    fn bad_ones_name_the_field() {
        for (selector, field) in [
            (requirement("pool", "in", &["a"]), "s.matchExpressions[0].operator"),
            (requirement("pool", "In", &[]), "s.matchExpressions[0].values"),
            (requirement("pool", "Exists", &["a"]), "s.matchExpressions[0].values"),
            (requirement("pool", "In", &["a", "b*"]), "s.matchExpressions[0].values[1]"),
            (requirement("", "Exists", &[]), "s.matchExpressions[0].key"),
            (requirement("Nvidia.com/x", "Exists", &[]), "s.matchExpressions[0].key"),
            (requirement("a/b/c", "Exists", &[]), "s.matchExpressions[0].key"),
            (labels("pool", "has space"), "s.matchLabels[pool]"),
            (labels("-pool", "x"), "s.matchLabels[-pool]"),
        ] {
            let denials = check(&selector, "s");
            assert_eq!(denials.len(), 1, "{denials:?}");
            assert_eq!(denials[0].field, field, "{denials:?}");
        }
    }
}
