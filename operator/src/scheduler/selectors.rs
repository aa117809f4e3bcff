//! CEL selectors of claims and DeviceClasses, evaluated as kube-scheduler does
//! (`k8s.io/dynamic-resource-allocation/cel`): `device.driver`, `device.attributes[domain].name`,
//! `device.capacity[domain].name`, with Kubernetes' `quantity` and `semver` types.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use cel::extractors::This;
use cel::objects::{Key, Map, Opaque};
use cel::{Context, ExecutionError, Program, Value};
use kerf_crds::device::{self, attribute};
use kerf_crds::names;

use crate::cache::quantity;

/// What a selector sees of a device. Ordered, so that it can be a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Device {
    pub attributes: BTreeMap<&'static str, device::Value>,
    pub capacities: BTreeMap<&'static str, u64>,
}

/// Attributes by which devices of one kind differ from GPU to GPU: a selector without them is evaluated once a kind.
const INDIVIDUAL: [&str; 6] = [
    attribute::UUID,
    attribute::PARENT_UUID,
    attribute::INDEX,
    attribute::NUMA_NODE,
    attribute::PCI_BUS_ID,
    attribute::PCIE_ROOT,
];

/// Remembered answers are dropped when there are this many.
const REMEMBERED: usize = 100_000;

/// Compiles selectors once and remembers their answers.
#[derive(Default)]
pub struct Selectors {
    programs: Mutex<HashMap<String, Compiled>>,
    answers: Mutex<HashMap<(String, Device), bool>>,
}

type Compiled = Result<Arc<Program>, String>;

impl std::fmt::Debug for Selectors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Selectors").finish_non_exhaustive()
    }
}

impl Selectors {
    /// Whether the selector may answer differently for two GPUs of the same kind.
    pub fn tells_gpus_apart(expression: &str) -> bool {
        let lower = expression.to_ascii_lowercase();
        INDIVIDUAL.iter().any(|name| {
            let name = name.split_once('/').map_or(*name, |(_, name)| name);
            lower.contains(&name.to_ascii_lowercase())
        })
    }

    /// Whether the device satisfies the selector. An error says what is wrong with the expression; an attribute that
    /// the device does not have makes it a device that does not match.
    pub fn matches(&self, expression: &str, device: &Device) -> Result<bool, String> {
        let mut device = device.clone();
        if !Self::tells_gpus_apart(expression) {
            device.attributes.retain(|name, _| !INDIVIDUAL.contains(name));
        }
        let key = (expression.to_owned(), device);
        if let Some(answer) = lock(&self.answers).get(&key) {
            return Ok(*answer);
        }
        let program = self.program(expression)?;
        let answer = evaluate(&program, &key.1)?;
        let mut answers = lock(&self.answers);
        if answers.len() >= REMEMBERED {
            answers.clear();
        }
        answers.insert(key, answer);
        Ok(answer)
    }

    fn program(&self, expression: &str) -> Compiled {
        let mut programs = lock(&self.programs);
        if programs.len() >= REMEMBERED {
            programs.clear();
        }
        programs
            .entry(expression.to_owned())
            .or_insert_with(|| {
                // The parser is generated code; an expression that it chokes on must not end the operator.
                std::panic::catch_unwind(|| Program::compile(expression))
                    .map_err(|_| format!("selector {expression:?} cannot be parsed"))?
                    .map(Arc::new)
                    .map_err(|error| format!("selector {expression:?}: {error}"))
            })
            .clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn evaluate(program: &Program, device: &Device) -> Result<bool, String> {
    let mut context = Context::default();
    functions(&mut context).map_err(|error| error.to_string())?;
    context.add_variable_from_value("device", describe(device));
    match program.execute(&context) {
        Ok(Value::Bool(answer)) => Ok(answer),
        Ok(other) => Err(format!("a selector must answer true or false, not {}", other.type_of())),
        Err(ExecutionError::NoSuchKey(_)) => Ok(false),
        Err(error) => Err(format!("a selector cannot be evaluated: {error}")),
    }
}

fn describe(device: &Device) -> Value {
    let mut attributes: BTreeMap<&str, HashMap<Key, Value>> = BTreeMap::new();
    // Both domains are there even if empty, as in Kubernetes.
    for domain in [names::DRIVER, "resource.kubernetes.io"] {
        attributes.entry(domain).or_default();
    }
    for (name, value) in &device.attributes {
        let (domain, name) = name.split_once('/').unwrap_or((names::DRIVER, name));
        let value = match value {
            device::Value::String(text) => Value::String(Arc::new(text.clone())),
            device::Value::Int(number) => Value::Int(*number),
            device::Value::Bool(truth) => Value::Bool(*truth),
            device::Value::Version(text) => match Semver::parse(text) {
                Some(version) => Value::Opaque(Arc::new(version)),
                None => continue,
            },
        };
        attributes.entry(domain).or_default().insert(name.into(), value);
    }
    let capacities: HashMap<Key, Value> = device
        .capacities
        .iter()
        .map(|(name, amount)| {
            ((*name).into(), Value::Opaque(Arc::new(Quantity(i128::from(*amount) * 1000))) as Value)
        })
        .collect();
    let map = |entries: HashMap<Key, Value>| Value::Map(Map { map: Arc::new(entries) });
    let attributes = attributes.into_iter().map(|(domain, all)| (domain.into(), map(all))).collect();
    map(HashMap::from([
        ("driver".into(), Value::String(Arc::new(names::DRIVER.into()))),
        ("attributes".into(), map(attributes)),
        ("capacity".into(), map(HashMap::from([(names::DRIVER.into(), map(capacities))]))),
        ("allowMultipleAllocations".into(), Value::Bool(false)),
    ]))
}

/// A Kubernetes quantity, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Quantity(i128);

impl Opaque for Quantity {
    fn runtime_type_name(&self) -> &str {
        "kubernetes.Quantity"
    }
}

/// A semantic version (https://semver.org, precedence of section 11; build metadata is not compared).
#[derive(Clone, Debug, PartialEq, Eq)]
struct Semver {
    numbers: [u64; 3],
    pre: Vec<String>,
}

impl Opaque for Semver {
    fn runtime_type_name(&self) -> &str {
        "kubernetes.Semver"
    }
}

impl Semver {
    fn parse(text: &str) -> Option<Self> {
        let text = text.split('+').next()?;
        let (numbers, pre) = match text.split_once('-') {
            Some((numbers, pre)) => (numbers, pre.split('.').map(str::to_owned).collect()),
            None => (text, Vec::new()),
        };
        let parsed: Vec<u64> = numbers.split('.').map(|part| part.parse().ok()).collect::<Option<_>>()?;
        Some(Self { numbers: parsed.try_into().ok()?, pre })
    }
}

impl PartialOrd for Semver {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Semver {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        use std::cmp::Ordering;
        self.numbers.cmp(&other.numbers).then_with(|| match (self.pre.is_empty(), other.pre.is_empty()) {
            (true, true) => Ordering::Equal,
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            (false, false) => {
                let numeric = |part: &String| part.parse::<u64>().ok();
                for (a, b) in self.pre.iter().zip(&other.pre) {
                    let order = match (numeric(a), numeric(b)) {
                        (Some(a), Some(b)) => a.cmp(&b),
                        (Some(_), None) => Ordering::Less,
                        (None, Some(_)) => Ordering::Greater,
                        (None, None) => a.cmp(b),
                    };
                    if order != Ordering::Equal {
                        return order;
                    }
                }
                self.pre.len().cmp(&other.pre.len())
            }
        })
    }
}

fn functions(context: &mut Context<'_, '_>) -> Result<(), cel::DeclarationError> {
    context.add_function("quantity", |text: Arc<String>| match quantity::parse_milli(&text) {
        Some(milli) => Ok(Value::Opaque(Arc::new(Quantity(milli)))),
        None => Err(ExecutionError::function_error("quantity", format!("{text:?} is no quantity"))),
    })?;
    context.add_function("isQuantity", |text: Arc<String>| quantity::parse_milli(&text).is_some())?;
    context.add_function("semver", |text: Arc<String>| match Semver::parse(&text) {
        Some(version) => Ok(Value::Opaque(Arc::new(version))),
        None => Err(ExecutionError::function_error("semver", format!("{text:?} is no semantic version"))),
    })?;
    context.add_function("isSemver", |text: Arc<String>| Semver::parse(&text).is_some())?;
    context.add_function("compareTo", |This(a): This<Value>, b: Value| {
        compare("compareTo", &a, &b).map(|order| order as i64)
    })?;
    context.add_function("isGreaterThan", |This(a): This<Value>, b: Value| {
        compare("isGreaterThan", &a, &b).map(|order| order.is_gt())
    })?;
    context.add_function("isLessThan", |This(a): This<Value>, b: Value| {
        compare("isLessThan", &a, &b).map(|order| order.is_lt())
    })?;
    for (name, index) in [("major", 0), ("minor", 1), ("patch", 2)] {
        context.add_function(name, move |This(version): This<Value>| match opaque::<Semver>(&version) {
            Some(version) => Ok(version.numbers[index] as i64),
            None => Err(ExecutionError::function_error(name, "only a semver has it")),
        })?;
    }
    context.add_function("asInteger", |This(amount): This<Value>| match opaque::<Quantity>(&amount) {
        Some(Quantity(milli)) if milli % 1000 == 0 => i64::try_from(milli / 1000)
            .map_err(|_| ExecutionError::function_error("asInteger", "the quantity is too large")),
        _ => Err(ExecutionError::function_error("asInteger", "not a whole quantity")),
    })?;
    Ok(())
}

fn opaque<T: Opaque + Clone>(value: &Value) -> Option<T> {
    match value {
        Value::Opaque(inner) => inner.downcast_ref::<T>().cloned(),
        _ => None,
    }
}

fn compare(function: &str, a: &Value, b: &Value) -> Result<std::cmp::Ordering, ExecutionError> {
    if let (Some(a), Some(b)) = (opaque::<Quantity>(a), opaque::<Quantity>(b)) {
        return Ok(a.cmp(&b));
    }
    if let (Some(a), Some(b)) = (opaque::<Semver>(a), opaque::<Semver>(b)) {
        return Ok(a.cmp(&b));
    }
    Err(ExecutionError::function_error(function, "both sides must be quantities, or both semantic versions"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> Device {
        Device {
            attributes: BTreeMap::from([
                (attribute::TYPE, device::Value::String("mig".into())),
                (attribute::PROFILE, device::Value::String("1g.10gb+me".into())),
                (attribute::INDEX, device::Value::Int(3)),
                (attribute::DRIVER_VERSION, device::Value::Version("580.95.5".into())),
                (attribute::PCI_BUS_ID, device::Value::String("0000:3b:00.0".into())),
            ]),
            capacities: BTreeMap::from([(device::capacity::MEMORY, 10 << 30)]),
        }
    }

    #[test]
    fn what_differs_from_gpu_to_gpu_is_known_in_selectors() {
        for name in ["uuid", "parentUUID", "index", "numaNode", "pciBusID", "pcieRoot"] {
            assert!(
                Selectors::tells_gpus_apart(&format!("device.attributes['domain'].{name} == 'x'")),
                "{name}"
            );
        }
        assert!(!Selectors::tells_gpus_apart("device.attributes['gpu.kerf.dev'].profile == '1g.10gb'"));
    }

    #[test]
    fn selectors_read_attributes_capacities_and_versions() {
        let selectors = Selectors::default();
        for (expression, expected) in [
            ("device.driver == 'gpu.kerf.dev'", true),
            ("device.driver == 'gpu.nvidia.com'", false),
            ("device.attributes['gpu.kerf.dev'].profile == '1g.10gb+me'", true),
            ("device.attributes['gpu.kerf.dev'].profile.startsWith('2g')", false),
            ("device.attributes['gpu.kerf.dev'].profile.matches('^[0-9]g.*me$')", true),
            ("device.attributes['gpu.kerf.dev'].index == 3", true),
            ("device.attributes['gpu.kerf.dev'].index < 3", false),
            ("'uuid' in device.attributes['gpu.kerf.dev']", false),
            ("device.attributes['gpu.kerf.dev'].nothing == 1", false),
            ("device.attributes['resource.kubernetes.io'].pciBusID == '0000:3b:00.0'", true),
            ("device.capacity['gpu.kerf.dev'].memory.compareTo(quantity('10Gi')) >= 0", true),
            ("device.capacity['gpu.kerf.dev'].memory.isGreaterThan(quantity('10Gi'))", false),
            ("device.capacity['gpu.kerf.dev'].memory == quantity('10240Mi')", true),
            ("device.attributes['gpu.kerf.dev'].driverVersion.isGreaterThan(semver('575.0.0'))", true),
            ("device.attributes['gpu.kerf.dev'].driverVersion.compareTo(semver('580.95.5-rc.1')) == 1", true),
            ("device.attributes['gpu.kerf.dev'].driverVersion.major() == 580", true),
        ] {
            assert_eq!(selectors.matches(expression, &device()), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn what_cannot_be_evaluated_is_an_error_that_says_so() {
        let selectors = Selectors::default();
        for expression in
            ["device.driver ==", "1 + 1", "no_such_function(device)", "quantity('x') == quantity('1')"]
        {
            assert!(selectors.matches(expression, &device()).is_err(), "{expression}");
        }
    }

    #[test]
    fn only_selectors_on_individual_attributes_are_evaluated_gpu_by_gpu() {
        assert!(Selectors::tells_gpus_apart("device.attributes['gpu.kerf.dev'].parentUUID == 'x'"));
        assert!(!Selectors::tells_gpus_apart("device.attributes['gpu.kerf.dev'].profile == '1g.10gb'"));
    }
}
