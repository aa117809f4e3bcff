//! Nonsense that is still JSON. `below` answers a number from 0 up to its argument, at random.

use serde_json::{Value, json};

/// Puts something else in place of one value somewhere in this one, itself included.
pub fn spoil(value: &mut Value, below: &mut dyn FnMut(usize) -> usize) {
    let mut at = below(count(value));
    descend(value, &mut at, below);
}

/// Number of values in a value, itself included.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum(),
        _ => 0,
    }
}

fn descend(value: &mut Value, at: &mut usize, below: &mut dyn FnMut(usize) -> usize) {
    if *at == 0 {
        *value = nonsense(value, below);
    }
    *at = at.wrapping_sub(1);
    match value {
        Value::Array(list) => list.iter_mut().for_each(|one| descend(one, at, below)),
        Value::Object(map) => map.values_mut().for_each(|one| descend(one, at, below)),
        _ => {}
    }
}

const NUMBERS: [u64; 13] =
    [0, 1, 2, 7, 8, 63, 64, 65, 1 << 20, i32::MAX as u64, u32::MAX as u64, i64::MAX as u64, u64::MAX];

/// Names and amounts that mean something here or there.
const TEXTS: [&str; 22] = [
    "",
    "r0",
    "r1",
    "ns/p0",
    "gang",
    "NotIn",
    "Gt",
    "Taken",
    "Idle",
    "AfterSwitch",
    "Distinct",
    "-1",
    "500m",
    "1e309",
    "9999999999999999999Ei",
    "9g.90gb",
    "1g.10gb+me",
    "nvidia.com/gpu",
    "\u{1F4A9}",
    "x/y/z",
    "*",
    "2026-13-01T00:00:00Z",
];

/// Something of the same type, most of the time.
fn nonsense(value: &Value, below: &mut dyn FnMut(usize) -> usize) -> Value {
    if below(20) == 0 {
        return [json!(null), json!({}), json!([]), json!("x"), json!(-1), json!(1.5)][below(6)].clone();
    }
    match value {
        Value::Null => json!(below(3)),
        Value::Bool(value) => json!(!value),
        Value::Number(_) => match below(NUMBERS.len() + 1) {
            13 => json!(i64::MIN),
            at => json!(NUMBERS[at]),
        },
        Value::String(_) => json!(TEXTS[below(TEXTS.len())]),
        Value::Array(list) => {
            let mut list = list.clone();
            match below(3) {
                _ if list.is_empty() => list.push(json!(0)),
                0 => drop(list.remove(below(list.len()))),
                1 => list.push(list[below(list.len())].clone()),
                _ => list.clear(),
            }
            Value::Array(list)
        }
        Value::Object(map) => {
            let mut map = map.clone();
            let keys: Vec<String> = map.keys().cloned().collect();
            match keys.as_slice() {
                [] => drop(map.insert("0".into(), json!([0]))),
                keys => drop(map.remove(&keys[below(keys.len())])),
            }
            Value::Object(map)
        }
    }
}
