//! The CustomResourceDefinitions as the API server and `kubectl explain` like them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt as _;

/// All CustomResourceDefinitions of Kerf.
pub fn definitions() -> Vec<CustomResourceDefinition> {
    let mut definitions = vec![crate::PartitionPolicy::crd(), crate::GpuNode::crd()];
    for definition in &mut definitions {
        for version in &mut definition.spec.versions {
            if let Some(schema) =
                version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut())
            {
                tidy(schema);
            }
        }
    }
    definitions
}

/// Makes a derived schema one for people and for Kubernetes, at every depth.
fn tidy(schema: &mut JSONSchemaProps) {
    // The API server knows no unsigned formats, and warns of them at each apply. The bounds say what they would.
    if schema.format.as_deref().is_some_and(|format| matches!(format, "uint32" | "uint64" | "uint")) {
        schema.format = Some("int64".to_owned());
    }
    schema.description = schema.description.as_deref().map(unwrap_lines);
    let properties = schema.properties.iter_mut().flatten().map(|(_, property)| property);
    let additional = schema.additional_properties.as_mut().and_then(|additional| match additional {
        JSONSchemaPropsOrBool::Schema(schema) => Some(schema.as_mut()),
        _ => None,
    });
    let items: &mut [JSONSchemaProps] = match schema.items.as_mut() {
        Some(JSONSchemaPropsOrArray::Schema(item)) => std::slice::from_mut(item),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items,
        None => &mut [],
    };
    let alternatives =
        [&mut schema.one_of, &mut schema.any_of, &mut schema.all_of].into_iter().flatten().flatten();
    for part in properties.chain(additional).chain(items).chain(alternatives) {
        tidy(part);
    }
}

/// Joins the lines of each paragraph: `kubectl explain` breaks lines by itself, and would keep those of the source too.
fn unwrap_lines(text: &str) -> String {
    let paragraphs: Vec<String> = text
        .split("\n\n")
        .map(|paragraph| paragraph.lines().map(str::trim).collect::<Vec<_>>().join(" "))
        .collect();
    paragraphs.join("\n\n")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The checked-in files are what `cargo run -p kerf-crds --example generate` would write.
    #[test]
    fn the_shipped_definitions_are_current() {
        for definition in definitions() {
            let name = format!("../deploy/crds/{}.yaml", definition.spec.names.plural);
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(&name);
            let shipped = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
            let shipped: CustomResourceDefinition = serde_yaml_ng::from_str(&shipped).unwrap();
            assert!(
                shipped == definition,
                "{name} is not what the types say; run `cargo run -p kerf-crds --example generate`"
            );
        }
    }

    #[test]
    fn every_field_is_described_without_the_sources_own_marks() {
        fn check(path: &str, schema: &JSONSchemaProps) {
            let text = schema.description.as_deref().unwrap_or_default();
            assert!(!text.contains("[`") && !text.contains("See "), "{path}: {text}");
            assert!(!text.trim_end_matches("\n\n").replace("\n\n", "").contains('\n'), "{path}: {text}");
            assert!(schema.format.as_deref().is_none_or(|format| !format.starts_with('u')), "{path}");
            for (name, property) in schema.properties.iter().flatten() {
                let text = property.description.as_deref().unwrap_or_default();
                assert!(!text.is_empty(), "{path}.{name} has no description");
                check(&format!("{path}.{name}"), property);
            }
            if let Some(JSONSchemaPropsOrArray::Schema(item)) = &schema.items {
                check(&format!("{path}[]"), item);
            }
        }
        for definition in definitions() {
            let schema = definition.spec.versions[0].schema.clone().unwrap().open_api_v3_schema.unwrap();
            for part in ["spec", "status"] {
                let schema = &schema.properties.as_ref().unwrap()[part];
                check(&format!("{}.{part}", definition.spec.names.singular.as_deref().unwrap()), schema);
            }
        }
    }

    #[test]
    fn lines_of_a_paragraph_are_joined() {
        assert_eq!(unwrap_lines("one\ntwo\n\nthree\n  four"), "one two\n\nthree four");
    }
}
