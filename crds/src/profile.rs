//! Names of MIG profiles.
//!
//! A profile's name comes from NVML (`1g.10gb+me`) and is never taken apart: its numbers are rounded, and a model
//! that nobody has heard of may have any name. Two spellings exist, NVML's and the one of Kubernetes resource names,
//! where `+` is not allowed and becomes `.` (`nvidia.com/mig-1g.10gb.me`); `-me` is another profile and stays.

use crate::names::MIG_RESOURCE_PREFIX;

/// The profile's name as it stands in resource and class names: `1g.10gb+me` → `1g.10gb.me`.
pub fn resource_suffix(profile: &str) -> String {
    profile.replace('+', ".")
}

/// The extended resource that asks for this profile: `1g.10gb+me` → `nvidia.com/mig-1g.10gb.me`.
pub fn resource_name(profile: &str) -> String {
    format!("{MIG_RESOURCE_PREFIX}{}", resource_suffix(profile))
}

/// Whether two spellings mean the same profile.
pub fn same(a: &str, b: &str) -> bool {
    let spelt = |byte: u8| if byte == b'+' { b'.' } else { byte };
    a == b || (a.len() == b.len() && a.bytes().map(spelt).eq(b.bytes().map(spelt)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_one_profile_is_the_same_and_no_two_profiles_are() {
        assert!(same("1g.10gb+me", "1g.10gb.me"));
        assert!(same("1g.24gb+me.all", "1g.24gb.me.all"));
        let distinct = ["1g.24gb", "1g.24gb+me", "1g.24gb-me", "1g.24gb+me.all", "1g.24gb+gfx"];
        for (i, a) in distinct.iter().enumerate() {
            for b in &distinct[i + 1..] {
                assert!(!same(a, b), "{a} and {b}");
                assert_ne!(resource_name(a), resource_name(b));
            }
        }
    }
}
