//! Numbers as MPS writes and reads them.

use crate::kernel::protocol::Device;

const MIB: u64 = 1 << 20;

/// A pinned-memory limit: the device it is for (`None`: each), by ordinal or UUID, and bytes.
pub type Limit = (Option<String>, u64);

/// `10G`, `512M`; with `kilo`, `1024K` too (v3: "Memory limit values use unit suffixes: 4G, 512M, 1024K"). "The value
/// must be in the form of an integer followed by a qualifier" (v2).
pub fn parse_bytes(text: &str, kilo: bool) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(end);
    let unit = match unit {
        "G" => 1 << 30,
        "M" => MIB,
        "K" if kilo => 1 << 10,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit).filter(|bytes| *bytes > 0)
}

/// As r595 prints a limit: whole gigabytes from one on, rounded down.
pub fn print_bytes(bytes: u64) -> String {
    match bytes / MIB {
        mib if mib >= 1024 => format!("{}G", mib / 1024),
        mib => format!("{mib}M"),
    }
}

/// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`: `0=1G,GPU-…=512MB`. Entries that make no sense are left out.
pub fn pinned_limits(text: &str) -> Vec<(String, u64)> {
    text.split(',')
        .filter_map(|entry| {
            let (device, value) = entry.trim().split_once('=')?;
            let value = value.strip_suffix('B').unwrap_or(value);
            Some((device.trim().to_owned(), parse_bytes(value, true)?))
        })
        .collect()
}

/// The device that an ordinal or a UUID, whole or its beginning, names among these.
pub fn find(devices: &[Device], name: &str) -> Option<usize> {
    if let Ok(ordinal) = name.parse::<usize>() {
        return (ordinal < devices.len()).then_some(ordinal);
    }
    let long_enough = name.len() > "GPU-".len() && (name.starts_with("GPU-") || name.starts_with("MIG-"));
    let mut found =
        devices.iter().enumerate().filter(|(_, device)| long_enough && device.uuid.starts_with(name));
    let (index, _) = found.next()?;
    found.next().is_none().then_some(index)
}

/// What `CUDA_VISIBLE_DEVICES` leaves of these devices, in its order: it ends at the first name that is none.
pub fn visible(devices: &[Device], variable: Option<&str>) -> Vec<Device> {
    let Some(names) = variable else { return devices.to_vec() };
    names.split(',').map_while(|name| Some(devices[find(devices, name.trim())?].clone())).collect()
}

/// SMs for a percentage. Pairs of SMs are what can be given ("50 % of 188 → 94, 25 % → 46").
pub fn sms(all: u32, percentage: f64) -> u32 {
    if percentage >= 100.0 {
        return all;
    }
    let pairs = (f64::from(all) * percentage / 200.0) as u32;
    (2 * pairs).clamp(2.min(all), all)
}

/// SMs in a chunk of a static partition: 8 since Hopper, 4 before.
pub fn chunk(capability: i32) -> u32 {
    if capability >= 9 { 8 } else { 4 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::protocol::DeviceId;

    #[test]
    fn limits_are_whole_numbers_with_a_unit() {
        assert_eq!(parse_bytes("10G", false), Some(10 << 30));
        assert_eq!(parse_bytes("900M", false), Some(900 << 20));
        assert_eq!(parse_bytes("1024K", true), Some(1 << 20));
        for wrong in ["1024K", "10", "1.5G", "-1G", "G", "", "10GB", "0M", "99999999999999G"] {
            assert_eq!(parse_bytes(wrong, false), None, "{wrong}");
        }
        assert_eq!(print_bytes(1536 << 20), "1G", "r595 rounds down");
        assert_eq!(print_bytes(1023 << 20), "1023M");
        assert_eq!(pinned_limits("0=1G,1=512MB"), [("0".into(), 1 << 30), ("1".into(), 512 << 20)]);
    }

    #[test]
    fn sm_counts_are_rounded_down() {
        assert_eq!((sms(188, 50.0), sms(188, 25.0), sms(188, 100.0), sms(188, 0.1)), (94, 46, 188, 2));
    }

    #[test]
    fn visible_devices_end_at_the_first_name_that_is_none() {
        let device = |minor, uuid: &str| Device {
            id: DeviceId { gpu: minor, mig: None },
            uuid: uuid.into(),
            name: String::new(),
            pci: String::new(),
            sms: 108,
            capability: 8,
        };
        let devices = [device(0, "GPU-aa1"), device(1, "GPU-ab2"), device(2, "GPU-ab3")];
        let minors = |variable| -> Vec<u32> {
            visible(&devices, variable).iter().map(|device| device.id.gpu).collect()
        };
        assert_eq!(minors(None), [0, 1, 2]);
        assert_eq!(minors(Some("2,GPU-aa,7,1")), [2, 0]);
        assert_eq!(minors(Some("GPU-ab")), [0; 0], "two begin so");
        assert_eq!(minors(Some("")), [0; 0]);
    }
}
