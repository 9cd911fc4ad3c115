{{/* The configuration of each service: what the chart has to say, then `config`, then the pipeline's own. */}}

{{- define "shoal.gatewayToml" -}}
{{- $s := .Values.security -}}
{{- $own := dict "insecure" .Values.gateway.insecure -}}
{{- if $s.keysSecret }}{{ $_ := set $own "keys_file" "/etc/shoal/keys/keys.toml" }}{{ end -}}
{{- if $s.gatewayTlsSecret -}}
{{- $_ := set $own "tls_certificate_file" "/etc/shoal/tls/certificate.pem" -}}
{{- $_ := set $own "tls_key_file" "/etc/shoal/tls/key.pem" -}}
{{- if $s.askClients }}{{ $_ := set $own "tls_client_ca_file" "/etc/shoal/tls/ca.pem" }}{{ end -}}
{{- end -}}
{{ include "shoal.section" (dict "name" "chassis" "values" (list .Values.config.chassis)) }}
{{ include "shoal.section" (dict "name" "gateway" "values" (list $own .Values.config.gateway)) }}
{{- end -}}

{{- define "shoal.kvstoreToml" -}}
{{- $own := dict "host_bytes" .Values.kvstore.hostBytes "disk_bytes" .Values.kvstore.diskBytes -}}
{{- if .Values.kvstore.diskBytes }}{{ $_ := set $own "disk_dir" "/var/lib/shoal/blocks" }}{{ end -}}
{{ include "shoal.section" (dict "name" "chassis" "values" (list .Values.config.chassis)) }}
{{ include "shoal.section" (dict "name" "kvstore" "values" (list $own .Values.config.kvstore)) }}
{{- end -}}

{{- define "shoal.batcherToml" -}}
{{- $own := dict "model" .pipeline.modelName "num_stages" .pipeline.stages -}}
{{ include "shoal.section" (dict "name" "chassis" "values" (list .root.Values.config.chassis)) }}
{{ include "shoal.section" (dict "name" "batcher" "values" (list $own .root.Values.config.batcher .pipeline.config.batcher)) }}
{{- end -}}

{{- define "shoal.autoscaleToml" -}}
{{- $scaling := .pipeline.autoscaling -}}
{{- $own := dict "model" .pipeline.modelName "pipelines_min" $scaling.min "pipelines_max" $scaling.max "ttft_objective_ms" $scaling.ttftObjectiveMs -}}
{{ include "shoal.section" (dict "name" "chassis" "values" (list .root.Values.config.chassis)) }}
{{ include "shoal.section" (dict "name" "autoscale" "values" (list $own .root.Values.config.autoscale)) }}
{{- end -}}

{{- define "shoal.workerToml" -}}
{{- $own := dict "model" .pipeline.model "model_name" .pipeline.modelName "threads" .pipeline.worker.threads -}}
{{- if .pipeline.worker.gpus }}{{ $_ := set $own "device" "cuda" }}{{ end -}}
{{ include "shoal.section" (dict "name" "chassis" "values" (list .root.Values.config.chassis)) }}
{{ include "shoal.section" (dict "name" "shard_worker" "values" (list $own .root.Values.config.shard_worker .pipeline.config.shard_worker)) }}
{{- end -}}
