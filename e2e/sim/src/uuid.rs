//! UUIDs in the form of version 5 (derived from a name), which all MIG UUIDs of hardware have. The digest is
//! SHA-256 instead of the standard's SHA-1: nobody can recompute a real one without the board's secrets anyway.

use sha2::{Digest, Sha256};

/// The UUID of `name` within `space`, without a prefix.
pub fn derived(space: &str, name: &str) -> String {
    let digest = Sha256::new().chain_update(space).chain_update([0]).chain_update(name).finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    bytes[6] = bytes[6] & 0x0f | 0x50;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::derived;

    #[test]
    fn a_derived_uuid_is_of_version_5_and_depends_on_both_parts() {
        let uuid = derived("a", "b");
        assert_eq!(uuid.len(), 36);
        assert_eq!(uuid.as_bytes()[14], b'5');
        assert!(matches!(uuid.as_bytes()[19], b'8' | b'9' | b'a' | b'b'));
        assert_eq!(uuid, derived("a", "b"));
        assert_ne!(uuid, derived("ab", ""));
        assert_ne!(uuid, derived("a", "c"));
    }
}
