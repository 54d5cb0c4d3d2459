"""Small outputs in the formats of `nvidia-smi`, written for these tests."""

XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>575.10</driver_version>
  <attached_gpus>2</attached_gpus>
  <gpu id="00000000:3B:00.0">
    <product_name>NVIDIA Test One</product_name>
    <uuid>GPU-11111111-0000-0000-0000-000000000001</uuid>
    <minor_number>1</minor_number>
    <fb_memory_usage><total>24576 MiB</total><reserved>300 MiB</reserved><used>4096 MiB</used><free>20180 MiB</free>
    </fb_memory_usage>
    <bar1_memory_usage><total>256 MiB</total><used>3 MiB</used><free>253 MiB</free></bar1_memory_usage>
    <utilization><gpu_util>37 %</gpu_util><memory_util>12 %</memory_util></utilization>
    <temperature><gpu_temp>61 C</gpu_temp><gpu_temp_max_threshold>95 C</gpu_temp_max_threshold></temperature>
    <gpu_power_readings><power_state>P2</power_state><average_power_draw>201.50 W</average_power_draw>
      <instant_power_draw>230.00 W</instant_power_draw><current_power_limit>350.00 W</current_power_limit>
    </gpu_power_readings>
    <module_power_readings><power_draw>N/A</power_draw></module_power_readings>
    <processes>
      <process_info><pid>4242</pid><type>C</type><process_name>python train.py</process_name>
        <used_memory>3800 MiB</used_memory></process_info>
      <process_info><pid>77</pid><type>G</type><process_name>GPU is lost</process_name>
        <used_memory>N/A</used_memory></process_info>
    </processes>
  </gpu>
  <gpu id="00000000:86:00.0">
    <product_name>NVIDIA Test Two</product_name>
    <uuid>GPU-22222222-0000-0000-0000-000000000002</uuid>
    <fb_memory_usage><total>16384 MiB</total><used>0 MiB</used><free>16384 MiB</free></fb_memory_usage>
    <utilization><gpu_util>N/A</gpu_util></utilization>
    <temperature><gpu_temp>40 C</gpu_temp></temperature>
    <power_readings><power_draw>30.00 W</power_draw><power_limit>250.00 W</power_limit>
      <enforced_power_limit>200.00 W</enforced_power_limit></power_readings>
    <processes></processes>
  </gpu>
</nvidia_smi_log>
"""

MIG_XML = """<nvidia_smi_log>
  <gpu id="00000000:01:00.0">
    <product_name>NVIDIA Split</product_name>
    <uuid>GPU-33333333-0000-0000-0000-000000000003</uuid>
    <mig_mode><current_mig>Enabled</current_mig></mig_mode>
    <mig_devices>
      <mig_device><index>0</index><gpu_instance_id>3</gpu_instance_id><compute_instance_id>0</compute_instance_id>
        <fb_memory_usage><total>9856 MiB</total><used>1200 MiB</used><free>8656 MiB</free></fb_memory_usage>
      </mig_device>
      <mig_device><index>1</index><gpu_instance_id>4</gpu_instance_id><compute_instance_id>0</compute_instance_id>
        <uuid>MIG-44444444-0000-0000-0000-000000000004</uuid>
        <fb_memory_usage><total>9856 MiB</total><used>12 MiB</used><free>9844 MiB</free></fb_memory_usage></mig_device>
    </mig_devices>
    <fb_memory_usage><total>40960 MiB</total><used>1212 MiB</used><free>39000 MiB</free></fb_memory_usage>
    <utilization><gpu_util>N/A</gpu_util></utilization>
    <processes>
      <process_info><gpu_instance_id>3</gpu_instance_id><compute_instance_id>0</compute_instance_id><pid>900</pid>
        <used_memory>N/A</used_memory></process_info>
    </processes>
  </gpu>
</nvidia_smi_log>
"""

LOST_FIELD_XML = """<nvidia_smi_log>
  <gpu id="00000000:01:00.0"><product_name>NVIDIA Gone</product_name><uuid>GPU is lost</uuid>
    <utilization><gpu_util>GPU is lost</gpu_util></utilization></gpu>
  <gpu id="00000000:02:00.0"><product_name>NVIDIA Here</product_name>
    <uuid>GPU-55555555-0000-0000-0000-000000000005</uuid></gpu>
</nvidia_smi_log>
"""

GB10_XML = """<nvidia_smi_log>
  <gpu id="0000000F:01:00.0">
    <product_name>NVIDIA GB10</product_name>
    <product_architecture>Blackwell</product_architecture>
    <addressing_mode>ATS</addressing_mode>
    <uuid>GPU-66666666-0000-0000-0000-000000000006</uuid>
    <fb_memory_usage><total>N/A</total><reserved>N/A</reserved><used>N/A</used><free>N/A</free></fb_memory_usage>
    <bar1_memory_usage><total>N/A</total><used>N/A</used><free>N/A</free></bar1_memory_usage>
    <utilization><gpu_util>0 %</gpu_util><memory_util>0 %</memory_util></utilization>
    <temperature><gpu_temp>35 C</gpu_temp></temperature>
    <gpu_power_readings><average_power_draw>11.17 W</average_power_draw>
      <current_power_limit>N/A</current_power_limit></gpu_power_readings>
    <processes>
      <process_info><pid>3141</pid><type>G</type><process_name>/usr/lib/xorg/Xorg</process_name>
        <used_memory>43 MiB</used_memory></process_info>
    </processes>
  </gpu>
</nvidia_smi_log>
"""

GB10_CSV = (
    "index, uuid, name, pci.bus_id, memory.total [MiB], memory.used [MiB], memory.free [MiB], utilization.gpu [%],"
    " power.draw [W], enforced.power.limit [W], temperature.gpu\n"
    "0, GPU-66666666-0000-0000-0000-000000000006, NVIDIA GB10, 0000000F:01:00.0, [N/A], [N/A], [N/A], 0 %, 11.17 W,"
    " [N/A], 35\n"
)

CSV = (
    "index, uuid, name, pci.bus_id, memory.total [MiB], memory.used [MiB], memory.free [MiB], utilization.gpu [%],"
    " power.draw [W], enforced.power.limit [W], temperature.gpu\n"
    "0, GPU-11111111-0000-0000-0000-000000000001, NVIDIA Test One, 00000000:3B:00.0, 24576 MiB, 4096 MiB, 20180 MiB,"
    " 37 %, 201.50 W, 350.00 W, 61\n"
    "1, GPU-22222222-0000-0000-0000-000000000002, NVIDIA Test Two, 00000000:86:00.0, 16384 MiB, 0 MiB, 16384 MiB,"
    " [N/A], [Not Supported], [Requested functionality has been deprecated], 40\n"
)

NO_UNITS_CSV = (
    "name, memory.total [MiB], memory.used [MiB], utilization.gpu [%], power.draw.instant [W], power.limit [W]\n"
    "NVIDIA Test One, 24576, 4096, 37, 201.50, 350.00\n"
)


LOST_CSV = (
    "index, uuid, name, memory.total [MiB], utilization.gpu [%]\n"
    "0, GPU-11111111-0000-0000-0000-000000000001, NVIDIA Test One, 24576 MiB, [GPU is lost]\n"
)

APPS = (
    "gpu_uuid, pid, used_gpu_memory [MiB], process_name\n"
    "GPU-11111111-0000-0000-0000-000000000001, 4242, 3800 MiB, python, with a comma, train.py\n"
    "GPU-11111111-0000-0000-0000-000000000001, 77, [N/A], Xorg\n"
    "GPU-22222222-0000-0000-0000-000000000002, 88, 5 MiB, [Not Found]\n"
)


APPS_WITHOUT_PID = (
    "gpu_uuid, pid, used_gpu_memory [MiB], process_name\n"
    "GPU-11111111-0000-0000-0000-000000000001, 4242, 3800 MiB, python\n"
    "GPU-11111111-0000-0000-0000-000000000001, [N/A], 120 MiB, [Not Found]\n"
)

APPS_WITHOUT_CARD = "pid, used_memory [MiB]\n4242, 3800 MiB\n"

LOST_LINE = "Unable to determine the device handle for GPU0: 0000:3B:00.0: GPU is lost.  Reboot to recover this GPU\n"

SAMPLES = {
    "nvidia-smi-xml": [XML, MIG_XML, GB10_XML, LOST_FIELD_XML, LOST_LINE],
    "nvidia-smi-csv": [CSV, GB10_CSV, NO_UNITS_CSV, LOST_CSV, LOST_LINE],
    "nvidia-smi-apps": [APPS, APPS_WITHOUT_CARD, APPS_WITHOUT_PID],
}
