{{- define "gradsharding.name" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "gradsharding.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "gradsharding.name" .) -}}
{{- else -}}
{{- required "serviceAccount.name: name a ServiceAccount that exists, or leave serviceAccount.create true" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "gradsharding.selector" -}}
app.kubernetes.io/name: gradsharding
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "gradsharding.labels" -}}
{{ include "gradsharding.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The image of a section of the values: dict "image" … "root" $ */}}
{{- define "gradsharding.image" -}}
{{- if not .image.repository -}}
{{- fail "image.repository and functions.image.repository are not set: build and push both images with `make images REGISTRY=host/path` and pass the --set flags that it prints" -}}
{{- end -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The watched namespaces, as a JSON list */}}
{{- define "gradsharding.namespaces" -}}
{{- .Values.watchNamespaces | default (list .Release.Namespace) | uniq | toJson -}}
{{- end -}}

{{/* What the operator does, as rules. tests/e2e/test_rights.py compares them with what it was seen to do. */}}
{{- define "gradsharding.rules" -}}
- apiGroups: [gradsharding.dev]
  resources: [aggregationrounds]
  verbs: [list, watch, patch, delete]
- apiGroups: [gradsharding.dev]
  resources: [aggregationrounds/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [secrets]
  {{- with .Values.rbac.secretNames }}
  resourceNames: {{ toJson . }}
  {{- end }}
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, delete]
- apiGroups: [serving.knative.dev]
  resources: [services]
  verbs: [get, list, create, patch, delete]
{{- end -}}
