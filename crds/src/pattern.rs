//! Shell-like patterns over profile and product names: `*` any run of characters, `?` one character.

use serde::{Deserialize, Serialize};

/// The pattern as written, e.g. `1g.*`, `*+me`, `NVIDIA A100*`. Matching is case-sensitive and covers the whole name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct Pattern(#[schemars(length(min = 1, max = 128))] pub String);

impl Pattern {
    /// Whether the whole of `name` matches.
    pub fn matches(&self, name: &str) -> bool {
        let (pattern, name): (Vec<char>, Vec<char>) = (self.0.chars().collect(), name.chars().collect());
        let (mut p, mut n) = (0, 0);
        // Where to go on after a mismatch: behind the last `*`, one more character swallowed by it.
        let mut retry: Option<(usize, usize)> = None;
        while n < name.len() {
            match pattern.get(p) {
                Some('*') => {
                    retry = Some((p + 1, n));
                    p += 1;
                }
                Some(c) if *c == '?' || *c == name[n] => {
                    p += 1;
                    n += 1;
                }
                _ => match retry {
                    Some((after_star, swallowed)) => {
                        p = after_star;
                        n = swallowed + 1;
                        retry = Some((after_star, n));
                    }
                    None => return false,
                },
            }
        }
        pattern[p..].iter().all(|c| *c == '*')
    }

    /// Whether the pattern matches a profile in either spelling (`1g.10gb+me` or `1g.10gb.me`).
    pub fn matches_profile(&self, profile: &str) -> bool {
        self.matches(profile) || self.matches(&crate::profile::resource_suffix(profile))
    }
}

impl From<&str> for Pattern {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_cover_the_whole_name() {
        for (pattern, name, expected) in [
            ("*", "1g.10gb", true),
            ("1g.*", "1g.10gb+me", true),
            ("1g.10gb", "1g.10gb+me", false),
            ("*+me", "1g.10gb+me", true),
            ("*+me", "1g.10gb+me.all", false),
            ("?g.*gb", "3g.40gb", true),
            ("*a*b*c", "xxaxxbxxbxxc", true),
            ("*a*b*c", "xxaxxcxxb", false),
            ("", "x", false),
        ] {
            assert_eq!(Pattern::from(pattern).matches(name), expected, "{pattern} against {name}");
        }
        assert!(Pattern::from("*.me").matches_profile("1g.10gb+me"));
    }
}
