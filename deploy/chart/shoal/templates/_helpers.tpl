{{- define "shoal.fullname" -}}
{{- if contains "shoal" .Release.Name -}}
{{- .Release.Name | trunc 24 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-shoal" .Release.Name | trunc 24 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of everything; {root, component, pipeline?, stage?}. */}}
{{- define "shoal.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{ include "shoal.selector" . }}
{{- end -}}

{{- define "shoal.selector" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pipeline }}
shoal/pipeline: {{ . }}
{{- end }}
{{- if hasKey . "stage" }}
shoal/stage: {{ .stage | quote }}
{{- end }}
{{- end -}}

{{- define "shoal.image" -}}
{{- $name := .name -}}
{{- $tag := .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- with .root.Values.image.registry -}}{{ . }}/{{- end -}}{{ $name }}:{{ $tag }}
{{- end -}}

{{/* A value of TOML: what YAML made a float is an integer where it has no fraction. */}}
{{- define "shoal.toml" -}}
{{- if kindIs "map" . -}}
{ {{ range $i, $key := keys . | sortAlpha }}{{ if $i }}, {{ end }}{{ $key | toJson }} = {{ include "shoal.toml" (get $ $key) }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{ range $i, $value := . }}{{ if $i }}, {{ end }}{{ include "shoal.toml" $value }}{{ end }}]
{{- else if kindIs "string" . -}}
{{ . | toJson }}
{{- else if kindIs "bool" . -}}
{{ . }}
{{- else if eq (float64 .) (floor .) -}}
{{ printf "%d" (int64 .) }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* A section of shoal.toml; {name, values}: a list of mappings, later ones win. */}}
{{- define "shoal.section" -}}
{{- $all := dict -}}
{{- range .values }}{{ range $key, $value := . }}{{ $_ := set $all $key $value }}{{ end }}{{ end -}}
[{{ .name }}]
{{ range $key := keys $all | sortAlpha -}}
{{ $key }} = {{ include "shoal.toml" (get $all $key) }}
{{ end -}}
{{- end -}}

{{/* Host of the bus, as its own chart calls it. */}}
{{- define "shoal.busHost" -}}
{{- $name := .Values.nats.nameOverride | default "nats" -}}
{{- if .Values.nats.fullnameOverride -}}
{{ .Values.nats.fullnameOverride }}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "shoal.busUrl" -}}
{{- $scheme := empty .Values.security.natsSecretPrefix | ternary "nats" "tls" -}}
{{- if .Values.nats.enabled -}}
{{ $scheme }}://{{ include "shoal.busHost" . }}:4222
{{- else -}}
{{ required "bus.url: with nats.enabled=false it names an existing NATS" .Values.bus.url }}
{{- end -}}
{{- if .Values.security.natsSecretPrefix -}}
?ca=/etc/shoal/nats/ca.pem&credentials=/etc/shoal/nats/credentials.toml
{{- end -}}
{{- end -}}

{{- define "shoal.busMonitor" -}}
{{- if .Values.nats.enabled -}}
{{ include "shoal.busHost" . }}.{{ .Release.Namespace }}:8222
{{- else -}}
{{ required "bus.monitor: autoscaling asks an existing NATS there (host:8222)" .Values.bus.monitor }}
{{- end -}}
{{- end -}}

{{/* Seconds from the first signal to the last: what chassis.drain_timeout_s allows, and some to end. */}}
{{- define "shoal.graceSeconds" -}}
{{- add (ceil (.Values.config.chassis.drain_timeout_s | default 30)) 10 -}}
{{- end -}}

{{- define "shoal.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: SHOAL_NATS_URL
  value: {{ include "shoal.busUrl" .root | quote }}
- name: SHOAL_CHASSIS_STREAM_REPLICAS
  value: {{ .root.Values.bus.streamReplicas | quote }}
- name: SHOAL_CHASSIS_METRICS_ADDRESS
  value: 0.0.0.0:9464
{{- if and .root.Values.security.rpcTlsSecret (not (has .component (list "gateway" "autoscale"))) }}
- name: SHOAL_CHASSIS_RPC_TLS_DIR
  value: /etc/shoal/rpc
{{- end }}
{{- range $name, $value := .env }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{- define "shoal.probes" -}}
startupProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ div (add .startupSeconds 1) 2 }}
livenessProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /ready, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{- define "shoal.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- if .lockMemory }}
    add: [IPC_LOCK]
{{- end }}
{{- end -}}

{{/* What every pod has; {root, component, of}. Service links would be read as settings: SHOAL_GATEWAY_PORT. */}}
{{- define "shoal.pod" -}}
serviceAccountName: {{ include "shoal.fullname" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Equal pods on as many hosts as there are; {root, ...selector}. */}}
{{- define "shoal.spread" -}}
topologySpreadConstraints:
  - topologyKey: {{ .root.Values.topology.host }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "shoal.selector" . | nindent 8 }}
{{- end -}}

{{- define "shoal.mounts" -}}
- name: config
  mountPath: /etc/shoal/shoal.toml
  subPath: shoal.toml
  readOnly: true
- name: temporary
  mountPath: /tmp
{{- if .root.Values.security.natsSecretPrefix }}
- name: nats
  mountPath: /etc/shoal/nats
  readOnly: true
{{- end }}
{{- if and .root.Values.security.rpcTlsSecret (not (has .component (list "gateway" "autoscale"))) }}
- name: rpc
  mountPath: /etc/shoal/rpc
  readOnly: true
{{- end }}
{{- end -}}

{{/* {root, component, config}: the key of the ConfigMap. */}}
{{- define "shoal.volumes" -}}
- name: config
  configMap:
    name: {{ include "shoal.fullname" .root }}
    items: [{key: {{ .config }}, path: shoal.toml}]
- name: temporary
  emptyDir: {sizeLimit: 1Gi}
{{- with .root.Values.security.natsSecretPrefix }}
- name: nats
  secret: {secretName: {{ printf "%s-%s" . ($.component | replace "_" "-") }}, defaultMode: 0440}
{{- end }}
{{- if and .root.Values.security.rpcTlsSecret (not (has .component (list "gateway" "autoscale"))) }}
- name: rpc
  secret: {secretName: {{ .root.Values.security.rpcTlsSecret }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* A model's name as a token of a subject: `chassis/subjects.py` writes other bytes as =XX. */}}
{{- define "shoal.modelToken" -}}
{{- . | replace " " "=20" | replace "+" "=2B" | replace "." "=2E" | replace "/" "=2F" | replace ":" "=3A" | replace "@" "=40" -}}
{{- end -}}

{{/* JSON of a mapping over its defaults, mappings inside them too; {defaults, values}. A zero or an empty word counts. */}}
{{- define "shoal.over" -}}
{{- $all := dict -}}
{{- range $key, $value := .defaults }}{{ $_ := set $all $key $value }}{{ end -}}
{{- range $key, $value := .values -}}
{{- $old := get $all $key -}}
{{- if and (kindIs "map" $old) (kindIs "map" $value) -}}
{{- $_ := set $all $key (include "shoal.over" (dict "defaults" $old "values" $value) | fromJson) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* JSON of all pipelines, whole. */}}
{{- define "shoal.pipelines" -}}
{{- include "shoal.check" . -}}
{{- $all := dict -}}
{{- range $name, $pipeline := .Values.pipelines -}}
{{- if $pipeline -}}
{{- $whole := include "shoal.over" (dict "defaults" $.Values.pipelineDefaults "values" $pipeline) | fromJson -}}
{{- if not $whole.modelName }}{{ fail (printf "pipelines.%s.modelName: what users call the model" $name) }}{{ end -}}
{{- if not $whole.model }}{{ fail (printf "pipelines.%s.model: the model's folder or file, or the name of a packaged one" $name) }}{{ end -}}
{{- $_ := set $all $name $whole -}}
{{- end -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* Combinations that no schema can say. */}}
{{- define "shoal.check" -}}
{{- $s := .Values.security -}}
{{- if not (or $s.keysSecret .Values.gateway.insecure (and $s.gatewayTlsSecret $s.askClients)) -}}
{{- fail "gateway: who may come in? security.keysSecret, security.askClients with gatewayTlsSecret, or gateway.insecure=true" -}}
{{- end -}}
{{- if and $s.askClients (not $s.gatewayTlsSecret) }}{{ fail "security.askClients: only with security.gatewayTlsSecret" }}{{ end -}}
{{- if and .Values.nats.enabled .Values.bus.url }}{{ fail "bus.url: names an existing NATS, but nats.enabled would run one too" }}{{ end -}}
{{- end -}}
